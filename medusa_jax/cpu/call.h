// Calls by XLA: arguments, results, attributes and threads, read through its interface for C. Its C++ header takes the
// compiler longer than the kernels do.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace {

// XLA's threads.
struct ThreadPool {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;

  // Whether there was an error, which is dropped.
  bool Failed(XLA_FFI_Error* error) const {
    XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    if (error) api->XLA_FFI_Error_Destroy(&args);
    return error;
  }
  int64_t num_threads() const {
    int64_t n = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, context, &n};
    Failed(api->XLA_FFI_ThreadPool_NumThreads(&args));
    return n;
  }
  // Runs `work` on another thread, or here if XLA has none.
  template <typename Work>
  void Schedule(Work work) const {
    const auto task = [](void* data) {
      Work* const work = static_cast<Work*>(data);
      (*work)();
      delete work;
    };
    Work* const data = new Work(std::move(work));
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, context, task, data};
    if (Failed(api->XLA_FFI_ThreadPool_Schedule(&args))) task(data);
  }
};

// Why a call is refused: thrown.
struct Refused {
  const char* why;
};
inline void Require(bool holds, const char* why) {
  if (!holds) throw Refused{why};
}

// An argument or result, or an attribute with numbers.
template <typename T>
struct Array {
  T* data;
  const int64_t* dims;
  int64_t rank, size;
};

struct Call {
  const XLA_FFI_CallFrame& frame;

  ThreadPool Pool() const { return {frame.api, frame.ctx}; }
  int64_t Args() const { return frame.args.size; }
  int64_t Rets() const { return frame.rets.size; }
  template <typename T>
  Array<T> Arg(int64_t i) const { return Of<T>(frame.args.args, frame.args.size, i); }
  template <typename T>
  Array<T> Ret(int64_t i) const { return Of<T>(frame.rets.rets, frame.rets.size, i); }
  // An attribute with a number, int64_t or double; the default if it is absent.
  template <typename T>
  T Number(const char* name, T absent) const {
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(Find(name, XLA_FFI_AttrType_SCALAR));
    return scalar ? *static_cast<const T*>(scalar->value) : absent;
  }
  Array<const int64_t> Numbers(const char* name) const {
    const auto* array = static_cast<const XLA_FFI_Array*>(Find(name, XLA_FFI_AttrType_ARRAY));
    Require(array, "an attribute is missing");
    return {static_cast<const int64_t*>(array->data), nullptr, 1, int64_t(array->size)};
  }

 private:
  template <typename T>
  static Array<T> Of(void** from, int64_t count, int64_t i) {
    using Bare = std::remove_const_t<T>;
    constexpr auto type = std::is_same_v<Bare, float>      ? XLA_FFI_DataType_F32
                          : std::is_same_v<Bare, uint32_t> ? XLA_FFI_DataType_U32
                          : std::is_same_v<Bare, int32_t>  ? XLA_FFI_DataType_S32
                                                           : XLA_FFI_DataType_PRED;
    const auto* buffer = i < count ? static_cast<const XLA_FFI_Buffer*>(from[i]) : nullptr;
    Require(buffer && buffer->dtype == type, "an argument or result is missing or has another type");
    int64_t size = 1;
    for (int64_t d = 0; d < buffer->rank; ++d) size *= buffer->dims[d];
    return {static_cast<T*>(buffer->data), buffer->dims, buffer->rank, size};
  }
  const void* Find(const char* name, XLA_FFI_AttrType type) const {
    for (int64_t i = 0; i < frame.attrs.size; ++i) {
      const XLA_FFI_ByteSpan& span = *frame.attrs.names[i];
      if (frame.attrs.types[i] == type && span.len == std::strlen(name) && !std::memcmp(span.ptr, name, span.len))
        return frame.attrs.attrs[i];
    }
    return nullptr;
  }
};

// What XLA calls: tells the version of its interface, or runs a call.
inline XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame, void (*run)(const Call&)) {
  for (auto* next = frame->extension_start; next; next = next->next)
    if (next->type == XLA_FFI_Extension_Metadata) {
      auto& version = reinterpret_cast<XLA_FFI_Metadata_Extension*>(next)->metadata->api_version;
      version.major_version = XLA_FFI_API_MAJOR, version.minor_version = XLA_FFI_API_MINOR;
      return nullptr;
    }
  try {
    return run({*frame}), nullptr;
  } catch (const Refused& refused) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, refused.why,
                                      XLA_FFI_Error_Code_INVALID_ARGUMENT};
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

}  // namespace
