// What the two files of bindings share: other people's memory, ids, directions, and letting go of
// native objects without the interpreter's lock. Logic of conversion only.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "intake.h"

namespace vkvmap {

// A view of somebody's memory for as long as this lives.
class Buffer {
 public:
  Buffer(pybind11::handle source, int flags, const char* what, const char* wanted) {
    if (PyObject_GetBuffer(source.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      throw pybind11::type_error(std::string(what) + " must be " + wanted + ", not " +
                                 Py_TYPE(source.ptr())->tp_name);
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  const Py_buffer& view() const { return view_; }
  bool holds(const char* formats, pybind11::ssize_t itemsize) const {
    const char* format = view_.format ? view_.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    return view_.itemsize == itemsize && format[0] != 0 && format[1] == 0 &&
           std::string(formats).find(format[0]) != std::string::npos;
  }

 private:
  Py_buffer view_{};
};

// Block and page ids by group, pointing into the callers' arrays, which are held meanwhile.
struct IdLists {
  std::vector<GroupIds> groups;
  size_t num_pairs = 0;
  std::vector<std::unique_ptr<Buffer>> arrays;

  // From (group, block ids, page ids) tuples.
  explicit IdLists(const pybind11::list& lists) {
    for (const pybind11::handle item : lists) {
      const auto entry = pybind11::cast<pybind11::tuple>(item);
      if (entry.size() != 3)
        throw pybind11::value_error("groups must be (group, blocks, pages) tuples");
      const auto group = pybind11::cast<uint32_t>(entry[0]);
      const Py_buffer& blocks = array(entry[1], "blocks");
      const Py_buffer& pages = array(entry[2], "pages");
      if (blocks.len != pages.len)
        throw pybind11::value_error("group " + std::to_string(group) + ": there are " +
                                    std::to_string(blocks.len / 8) + " block ids and " +
                                    std::to_string(pages.len / 8) +
                                    " page ids; they come in pairs");
      const size_t count = static_cast<size_t>(blocks.len / 8);
      groups.push_back({group, static_cast<const int64_t*>(blocks.buf),
                        static_cast<const int64_t*>(pages.buf), count});
      num_pairs += count;
    }
  }

 private:
  const Py_buffer& array(pybind11::handle source, const char* what) {
    constexpr const char* kWanted = "a contiguous one-dimensional int64 array";
    arrays.push_back(
        std::make_unique<Buffer>(source, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, what, kWanted));
    const Buffer& buffer = *arrays.back();
    if (!buffer.holds("lq", 8) || buffer.view().ndim != 1)
      throw pybind11::type_error(std::string(what) + " must be " + kWanted);
    return buffer.view();
  }
};

inline Direction direction_of(int value) {
  if (value != 0 && value != 1)
    throw pybind11::value_error("direction must be STORE (0) or LOAD (1)");
  return static_cast<Direction>(value);
}

// Whether this thread has the interpreter's lock. PyGILState_Check() says yes to every thread once
// there has been a sub-interpreter.
inline bool has_gil() {
  if (!Py_IsInitialized()) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

// `owned` as a holder for Python, whose last owner lets go without the interpreter's lock: ends of
// native objects wait for threads and devices, and other Python threads are not to wait with them.
template <class T>
std::shared_ptr<T> freed_without_gil(std::shared_ptr<T> owned) {
  T* const object = owned.get();
  return std::shared_ptr<T>(object, [owned = std::move(owned)](T*) mutable {
    if (has_gil()) {
      pybind11::gil_scoped_release released;
      owned.reset();
    } else {
      owned.reset();
    }
  });
}

}  // namespace vkvmap
