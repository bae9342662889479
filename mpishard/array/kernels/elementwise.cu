// Elementwise operations. Each thread goes through the array in strides of the whole grid, so every grid is right.

// i % period for an array of n elements
__device__ inline i64 repeated(i64 i, i64 n, i64 period) {
    if (period == n) return i;
    return n <= 0xffffffffll ? (i64)((u32)i % (u32)period) : i % period;
}

// out[i] = x[i] + y[i % period]
extern "C" __global__ void add(const T* x, const T* y, T* out, i64 n, i64 period) {
    for (i64 i = first_index(); i < n; i += index_stride())
        store(out + i, load(x + i) + load(y + repeated(i, n, period)));
}

extern "C" __global__ void add_strided(const T* x, const T* y, T* out, i64 d0, i64 d1, i64 d2, i64 d3, i64 xs0, i64 xs1,
                                       i64 xs2, i64 xs3, i64 ys0, i64 ys1, i64 ys2, i64 ys3, i64 os0, i64 os1, i64 os2,
                                       i64 os3) {
    i64 n = d0 * d1 * d2 * d3;
    for (i64 i = first_index(); i < n; i += index_stride()) {
        Place at = place(i, n, d1, d2, d3);
        A sum = load(x + at.offset(xs0, xs1, xs2, xs3)) + load(y + at.offset(ys0, ys1, ys2, ys3));
        store(out + at.offset(os0, os1, os2, os3), sum);
    }
}

// out[i] (+)= x[i] * y[i % period]
extern "C" __global__ void multiply(const T* x, const T* y, G* out, i64 n, i64 period, int add) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        A product = load(x + i) * load(y + repeated(i, n, period));
        store(out + i, add ? (A)load(out + i) + product : product);
    }
}

extern "C" __global__ void multiply_strided(const T* x, const T* y, G* out, i64 d0, i64 d1, i64 d2, i64 d3, i64 xs0,
                                            i64 xs1, i64 xs2, i64 xs3, i64 ys0, i64 ys1, i64 ys2, i64 ys3, i64 os0,
                                            i64 os1, i64 os2, i64 os3, int add) {
    i64 n = d0 * d1 * d2 * d3;
    for (i64 i = first_index(); i < n; i += index_stride()) {
        Place at = place(i, n, d1, d2, d3);
        A product = load(x + at.offset(xs0, xs1, xs2, xs3)) * load(y + at.offset(ys0, ys1, ys2, ys3));
        G* target = out + at.offset(os0, os1, os2, os3);
        store(target, add ? (A)load(target) + product : product);
    }
}

// --- GELU (Hendrycks & Gimpel 2016, section 2)

constexpr A CUBIC = (A)0.044715;
constexpr A SQRT_2_OVER_PI = (A)0.79788456080286535588;
constexpr A SQRT_HALF = (A)0.70710678118654752440;
constexpr A ONE_OVER_SQRT_2PI = (A)0.39894228040143267794;
constexpr A HALF = (A)0.5;
constexpr A ONE = (A)1;

// tanh(sqrt(2 / pi) * (u + 0.044715 u**3)), or erf(u / sqrt(2))
__device__ inline A gelu_curve(A u, int tanh_form) {
    return tanh_form ? tanh_of(SQRT_2_OVER_PI * (u * (ONE + CUBIC * (u * u)))) : erf_of(u * SQRT_HALF);
}

extern "C" __global__ void gelu(const T* x, T* y, i64 n, int tanh_form) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        A u = load(x + i);
        store(y + i, (ONE + gelu_curve(u, tanh_form)) * u * HALF);
    }
}

extern "C" __global__ void gelu_backward(const T* x, const T* dy, T* dx, i64 n, int tanh_form) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        A u = load(x + i);
        A t = gelu_curve(u, tanh_form);
        A slope;
        if (tanh_form) {
            // gelu' = (1 + t) / 2 * (1 + u (1 - t) c (1 + 3 * 0.044715 u**2)), c = sqrt(2 / pi)
            A inner = SQRT_2_OVER_PI * (ONE + (A)(3 * 0.044715) * (u * u));
            slope = (ONE + inner * u * (ONE - t)) * (ONE + t) * HALF;
        } else {
            // gelu' = Phi(u) + u phi(u)
            slope = exp_of(u * u * -HALF) * u * ONE_OVER_SQRT_2PI + (ONE + t) * HALF;
        }
        store(dx + i, slope * load(dy + i));
    }
}

// --- dropout

// Philox4x64-10 (Salmon et al. 2011, section 4): four 64-bit words of the counter (block + 1, 0, step, 0) under the key
// (seed, stream), as [Note: counter layout] of mpishard/array/random.py.
struct Words {
    u64 w0, w1, w2, w3;
};

__device__ inline Words philox(u64 seed, u64 stream, u64 step, u64 block) {
    Words c = {block + 1, 0, step, 0};
    for (int round = 0; round < 10; round++) {
        u64 high0 = __umul64hi(0xD2E7470EE14C6C93ull, c.w0), low0 = 0xD2E7470EE14C6C93ull * c.w0;
        u64 high2 = __umul64hi(0xCA5A826395121157ull, c.w2), low2 = 0xCA5A826395121157ull * c.w2;
        c = {high2 ^ c.w1 ^ seed, low2, high0 ^ c.w3 ^ stream, low0};
        seed += 0x9E3779B97F4A7C15ull;
        stream += 0xBB67AE8584CAA73Bull;
    }
    return c;
}

// y = x * keep * scale. One thread takes the eight numbers of a Philox block, two of each word, the low half first.
extern "C" __global__ void dropout(const T* x, T* y, i64 n, A rate, A scale, u64 seed, u64 stream, u64 step,
                                   u64 first) {
    i64 skip = (i64)(first % 8);  // numbers of the first block that belong to elements before x
    i64 blocks = (n + skip + 7) / 8;
    for (i64 block = first_index(); block < blocks; block += index_stride()) {
        Words words = philox(seed, stream, step, first / 8 + (u64)block);
        for (int half = 0; half < 8; half++) {
            i64 i = 8 * block + half - skip;
            u64 word = half < 2 ? words.w0 : half < 4 ? words.w1 : half < 6 ? words.w2 : words.w3;
            u32 bits = (u32)(half % 2 ? word >> 32 : word);
            if (i < 0 || i >= n) continue;
            // 24 bits: a number in [0, 1). It is a float whatever A is, and so is what it is compared with.
            float number = (float)(bits >> 8) * (1.0f / 16777216.0f);
            A keep = number >= (float)rate ? ONE : (A)0;
            store(y + i, load(x + i) * scale * keep);
        }
    }
}
