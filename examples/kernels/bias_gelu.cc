// y = gelu(x + bias), and its gradient, each in one pass over the memory: the exact GELU, computed in float32 (double
// for double). With a CUDA compiler `bias_gelu.cu` has the GPU's kernels; WITH_CUDA says that it is linked in.
#include <cmath>
#include <type_traits>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#ifdef WITH_CUDA
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"
#endif

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status LikeX(InferenceContext* c) {
  ShapeHandle x, bias;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &x));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &bias));
  tensorflow::shape_inference::DimensionHandle width;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(x, -1), c->Dim(bias, 0), &width));
  c->set_output(0, x);
  return absl::OkStatus();
}

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// gelu(u), or where `upstream` is given, upstream * gelu'(u).
template <typename T>
void OnCpu(const T* x, const T* bias, const T* upstream, T* out, int64_t begin, int64_t end, int64_t width) {
  const Wide<T> half_root = 0.70710678118654752440, density = 0.39894228040143267794;
  int64_t column = begin % width;
  for (int64_t i = begin; i < end; ++i) {
    const Wide<T> u = static_cast<Wide<T>>(x[i]) + static_cast<Wide<T>>(bias[column]);
    const Wide<T> below = Wide<T>(0.5) * (Wide<T>(1) + std::erf(u * half_root));
    if (upstream == nullptr) {
      out[i] = static_cast<T>(u * below);
    } else {
      out[i] = static_cast<T>(static_cast<Wide<T>>(upstream[i]) * (below + u * density * std::exp(-u * u / 2)));
    }
    if (++column == width) column = 0;
  }
}

}  // namespace

#ifdef WITH_CUDA
// bias_gelu.cu; null, or what went wrong.
extern "C" const char* bias_gelu_on_gpu(int type, const void* x, const void* bias, const void* upstream, void* out,
                                        int64_t count, int64_t width, void* stream);
#endif

namespace {

template <typename T>
void Fill(OpKernelContext* context, const Tensor& x, const Tensor& bias, const T* upstream, Tensor* out, bool on_gpu) {
  const int64_t count = x.NumElements(), width = bias.NumElements();
  const T *x_at = x.flat<T>().data(), *bias_at = bias.flat<T>().data();
  T* out_at = out->flat<T>().data();
  if (!on_gpu) {
    auto* threads = context->device()->tensorflow_cpu_worker_threads()->workers;
    threads->ParallelFor(count, /*cost_per_unit=*/30, [=](int64_t begin, int64_t end) {
      OnCpu<T>(x_at, bias_at, upstream, out_at, begin, end, width);
    });
    return;
  }
#ifdef WITH_CUDA
  void* stream = context->op_device_context()->stream()->platform_specific_handle().stream;
  const char* wrong = bias_gelu_on_gpu(tensorflow::DataTypeToEnum<T>::value, x_at, bias_at, upstream, out_at, count,
                                       width, stream);
  OP_REQUIRES(context, wrong == nullptr, absl::InternalError(wrong));
#endif
}

template <typename T, bool kOnGpu, bool kIsGradient>
class BiasGelu : public OpKernel {
 public:
  explicit BiasGelu(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &bias = context->input(1);
    OP_REQUIRES(context, x.dims() >= 1 && bias.dims() == 1 && x.dim_size(x.dims() - 1) == bias.dim_size(0),
                absl::InvalidArgumentError("bias must be [n] and x [..., n]. Received: bias " +
                                           bias.shape().DebugString() + ", x " + x.shape().DebugString()));
    const T* upstream = nullptr;
    if (kIsGradient) {
      OP_REQUIRES(context, context->input(2).shape() == x.shape(),
                  absl::InvalidArgumentError("The gradient must have the shape of x."));
      upstream = context->input(2).flat<T>().data();
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &out));
    if (x.NumElements() > 0) Fill<T>(context, x, bias, upstream, out, kOnGpu);
  }
};

}  // namespace

REGISTER_OP("ExampleBiasGelu")
    .Attr("T: {half, bfloat16, float, double}")
    .Input("x: T")
    .Input("bias: T")
    .Output("y: T")
    .SetShapeFn(LikeX);
REGISTER_OP("ExampleBiasGeluGrad")
    .Attr("T: {half, bfloat16, float, double}")
    .Input("x: T")
    .Input("bias: T")
    .Input("upstream: T")
    .Output("dx: T")
    .SetShapeFn(LikeX);

#define REGISTER(T, DEVICE, ON_GPU)                                                                       \
  REGISTER_KERNEL_BUILDER(Name("ExampleBiasGelu").Device(tensorflow::DEVICE).TypeConstraint<T>("T"),      \
                          BiasGelu<T, ON_GPU, false>);                                                    \
  REGISTER_KERNEL_BUILDER(Name("ExampleBiasGeluGrad").Device(tensorflow::DEVICE).TypeConstraint<T>("T"),  \
                          BiasGelu<T, ON_GPU, true>)
#define REGISTER_ALL(DEVICE, ON_GPU)       \
  REGISTER(Eigen::half, DEVICE, ON_GPU);   \
  REGISTER(Eigen::bfloat16, DEVICE, ON_GPU); \
  REGISTER(float, DEVICE, ON_GPU);         \
  REGISTER(double, DEVICE, ON_GPU)

REGISTER_ALL(DEVICE_CPU, false);
#ifdef WITH_CUDA
REGISTER_ALL(DEVICE_GPU, true);
#endif
