// Loads the CUDA kernels and torch's function for the current stream when the first tensor on a GPU
// needs them. Neither is linked: the kernels may be missing from an installation, and a torch
// without CUDA has no such function.
#include "cuda_api.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace epmoe::cuda {
namespace {

std::string path_of_kernels() {
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&library), &self);
  std::string path = self.dli_fname ? self.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + "libepmoe_cuda.so";
}

Library load() {
  std::string path = path_of_kernels();
  void* kernels = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* table = kernels ? dlsym(kernels, kApiSymbol) : nullptr;
  if (!table)
    throw std::runtime_error(
        "this installation of epmoe has no CUDA kernels (" + std::string(dlerror()) +
        "): install a wheel that `make wheel` built with nvcc on the PATH, or, if epmoe builds "
        "its library at first use (for GPUs of compute capability 8.0 or newer), put nvcc on the "
        "PATH and start "
        "again");
  // Python has loaded torch by now. The stable ABI has the native handle of a stream only since
  // torch 2.13.
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* current_stream = torch ? dlsym(torch, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (!current_stream)
    throw std::runtime_error("this build of torch has no CUDA: install one that has");
  const Api* api = reinterpret_cast<const Api* (*)()>(table)();
  // The first call starts the CUDA runtime inside the library, which a stream that is being
  // captured may not allow.
  int device = 0;
  if (int error = api->current_device(&device))
    throw std::runtime_error(std::string("CUDA: ") + api->error_string(error));
  return {api, reinterpret_cast<decltype(Library::current_stream)>(current_stream)};
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace epmoe::cuda
