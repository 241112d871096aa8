// The least of a test framework: a failed check says where, and the program fails.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                   \
    }                                                                                 \
  } while (false)

// The statement must refuse its input with an explanation that contains `words`.
#define CHECK_REFUSED(statement, words)                                                   \
  do {                                                                                    \
    std::string said = "(nothing)";                                                       \
    try {                                                                                 \
      statement;                                                                          \
    } catch (const std::invalid_argument& error) {                                        \
      said = error.what();                                                                \
    }                                                                                     \
    if (said.find(words) == std::string::npos) {                                          \
      std::fprintf(stderr, "%s:%d: expected a refusal with \"%s\", got: %s\n", __FILE__, __LINE__, \
                   words, said.c_str());                                                  \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

#define RUN(test)                          \
  do {                                     \
    std::printf("%s\n", #test);            \
    std::fflush(stdout);                   \
    test();                                \
  } while (false)
