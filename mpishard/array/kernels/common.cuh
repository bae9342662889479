// What all kernels share: element types, conversions, places in arrays, sums within a block.
//
// The text of this file stands before that of each kernel file. The macros ELEMENT and GRADIENT come from the options
// of the compiler (kernels/__init__.py) and name float, double, fp16 or bf16. Every operation reads its operands, computes in
// A and rounds once, when it stores. Every launch has BLOCK threads a block.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

inline constexpr int BLOCK = 256;
inline constexpr int WARP = 32;
inline constexpr int WARPS = BLOCK / WARP;
inline constexpr u32 ALL_LANES = 0xffffffffu;

// --- element types

// bfloat16: the upper half of a float.
struct bf16 {
    unsigned short bits;
};

// float16 of IEEE 754-2008. The processor converts; a compiler for another one brings these three functions along.
struct fp16 {
    unsigned short bits;
};

#ifdef __CUDACC__
__device__ inline float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline unsigned short half_of(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ inline unsigned short half_of(double value) {
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
    return bits;
}
#endif

__device__ inline float load(const fp16* x) { return float_of_half(x->bits); }
__device__ inline float load(const bf16* x) { return __uint_as_float((u32)x->bits << 16); }
__device__ inline float load(const float* x) { return *x; }
__device__ inline double load(const double* x) { return *x; }

__device__ inline void store(double* out, double value) { *out = value; }
__device__ inline void store(float* out, float value) { *out = value; }
__device__ inline void store(float* out, double value) { *out = (float)value; }

// To the nearest, ties to even; infinite from 65520 on.
__device__ inline void store(fp16* out, float value) { out->bits = half_of(value); }
__device__ inline void store(fp16* out, double value) { out->bits = half_of(value); }

// To the nearest, ties to even: the carry of the addition is the rounding. NaN is kept apart, lest it carry away.
__device__ inline void store(bf16* out, float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        out->bits = (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
    else
        out->bits = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// Through float, as ml_dtypes casts.
__device__ inline void store(bf16* out, double value) { store(out, (float)value); }

typedef ELEMENT T;                              // activations and gathered parameters
typedef GRADIENT G;                             // a gradient or a sum: T or A (for copies, any)
typedef decltype(load((const T*)nullptr)) A;    // the accumulator of T

// The functions of one name for both accumulators.
__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline double log_of(double x) { return log(x); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }
__device__ inline float erf_of(float x) { return erff(x); }
__device__ inline double erf_of(double x) { return erf(x); }
__device__ inline float sqrt_of(float x) { return sqrtf(x); }
__device__ inline double sqrt_of(double x) { return sqrt(x); }
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }
__device__ inline double larger(double x, double y) { return fmax(x, y); }

__device__ inline A infinity() { return (A)__uint_as_float(0x7f800000u); }
__device__ inline A not_a_number() { return (A)__uint_as_float(0x7fc00000u); }

// --- grid-stride loops: for (i64 i = first_index(); i < n; i += index_stride())

__device__ inline i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 index_stride() { return (i64)gridDim.x * blockDim.x; }

// --- places in strided arrays

struct Place {
    i64 i0, i1, i2, i3;
    __device__ i64 offset(i64 s0, i64 s1, i64 s2, i64 s3) const { return i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3; }
};

// Where element i of d0 * d1 * d2 * d3 = n elements stands. 64-bit division is slow on a GPU: small arrays go without.
__device__ inline Place place(i64 i, i64 n, i64 d1, i64 d2, i64 d3) {
    if (n <= 0xffffffffll) {
        u32 left = (u32)i, e1 = (u32)d1, e2 = (u32)d2, e3 = (u32)d3;
        u32 row = left / e3, plane = row / e2, cube = plane / e1;
        return {cube, plane - cube * e1, row - plane * e2, left - row * e3};
    }
    i64 row = i / d3, plane = row / d2, cube = plane / d1;
    return {cube, plane - cube * d1, row - plane * d2, i - row * d3};
}

// --- sums within a block, in an order that depends on nothing but BLOCK

template <typename Number>
__device__ inline Number warp_sum(Number value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// All threads of the block call it; all get the sum.
template <typename Number>
__device__ inline Number block_sum(Number value) {
    __shared__ Number partial[WARPS];
    value = warp_sum(value);
    __syncthreads();  // partial may still be read from the call before
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    Number total = partial[0];
    for (int warp = 1; warp < WARPS; warp++) total += partial[warp];
    return total;
}

// The largest value of the block's threads; NaN is left out, as in fmax.
template <typename Number>
__device__ inline Number block_max(Number value) {
    __shared__ Number partial[WARPS];
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = larger(value, __shfl_xor_sync(ALL_LANES, value, distance));
    __syncthreads();  // partial may still be read from the call before
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    Number top = partial[0];
    for (int warp = 1; warp < WARPS; warp++) top = larger(top, partial[warp]);
    return top;
}
