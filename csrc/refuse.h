// How native code says no: one sentence, made of its parts, as std::invalid_argument.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace vkvmap {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(text(parts...));
}

}  // namespace vkvmap
