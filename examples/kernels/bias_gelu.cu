// The GPU's side of bias_gelu.cc. No header of TensorFlow's is needed: a pointer to its stream is enough.
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, bool kIsGradient>
__global__ void BiasGelu(const T* x, const T* bias, const T* upstream, T* out, int64_t count, int64_t width) {
  const Wide<T> half_root = 0.70710678118654752440, density = 0.39894228040143267794;
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const Wide<T> u = static_cast<Wide<T>>(x[i]) + static_cast<Wide<T>>(bias[i % width]);
    const Wide<T> below = Wide<T>(0.5) * (Wide<T>(1) + erf(u * half_root));
    if (kIsGradient) {
      out[i] = static_cast<T>(static_cast<Wide<T>>(upstream[i]) * (below + u * density * exp(-u * u / 2)));
    } else {
      out[i] = static_cast<T>(u * below);
    }
  }
}

template <typename T>
void Launch(const void* x, const void* bias, const void* upstream, void* out, int64_t count, int64_t width,
            cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  const int blocks = static_cast<int>(wanted < 65536 ? wanted : 65536);
  auto* kernel = upstream == nullptr ? BiasGelu<T, false> : BiasGelu<T, true>;
  kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(bias),
                                          static_cast<const T*>(upstream), static_cast<T*>(out), count, width);
}

}  // namespace

// `type` is TensorFlow's DataType.
extern "C" const char* bias_gelu_on_gpu(int type, const void* x, const void* bias, const void* upstream, void* out,
                                        int64_t count, int64_t width, void* stream) {
  auto* launch = type == 1    ? Launch<float>
                 : type == 2  ? Launch<double>
                 : type == 14 ? Launch<__nv_bfloat16>
                 : type == 19 ? Launch<__half>
                              : nullptr;
  if (launch == nullptr) return "bias_gelu has no kernel for this type";
  launch(x, bias, upstream, out, count, width, static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
