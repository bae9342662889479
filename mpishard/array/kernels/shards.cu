// Operations on flat shards: ordered sums, norms, AdamW, checksums.

// out (+)= block
extern "C" __global__ void accumulate(const T* block, A* out, i64 n, int add) {
    for (i64 i = first_index(); i < n; i += index_stride()) out[i] = add ? out[i] + load(block + i) : load(block + i);
}

// out (+)= block 0 + block 1 + ..., one after another; block q is blocks + q * n, but for q == own_index it is own.
// Every ``bracket`` blocks (count is a multiple) are summed by themselves first, and their sums are what is added.
extern "C" __global__ void ordered_sum(const T* blocks, const T* own, A* out, i64 n, i64 count, i64 own_index, int add,
                                       i64 bracket) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        A total = add ? out[i] : (A)0;
        for (i64 first = 0; first < count; first += bracket) {
            A sum = (A)0;
            for (i64 q = first; q < first + bracket; q++) {
                A value = load(q == own_index ? own + i : blocks + q * n + i);
                sum = q == first ? value : sum + value;  // 0 + -0.0 would lose a sign
            }
            total = first == 0 && !add ? sum : total + sum;
        }
        out[i] = total;
    }
}

// The index of the range (start, stop) that holds a place, or -1; bounds are count such pairs in order.
__device__ inline i64 range_of(const i64* bounds, i64 count, i64 at) {
    i64 low = 0, high = count;  // ranges before low start at or before the place; ranges from high on start behind it
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (bounds[2 * middle] <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 && at < bounds[2 * low - 1] ? low - 1 : -1;
}

constexpr i64 CHUNK = 512;  // constants.CHUNK

// out[i] = sum of the squares of chunk i in fp64, without what lies in holes; one block a chunk
extern "C" __global__ void square_sums(const T* x, const i64* holes, double* out, i64 chunks, i64 holes_count) {
    i64 chunk = blockIdx.x;
    if (chunk >= chunks) return;
    double sum = 0;
    for (i64 i = chunk * CHUNK + threadIdx.x; i < (chunk + 1) * CHUNK; i += BLOCK) {
        double value = load(x + i);
        if (range_of(holes, holes_count, i) < 0) sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[chunk] = sum;
}

// out[0] = sum of x in fp64; one block, so that the order is fixed
extern "C" __global__ void sum64(const T* x, double* out, i64 n) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += BLOCK) sum += load(x + i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] = sum;
}

// --- exact sums: [Note: fixed point] of mpishard/shard/exact.py

constexpr int LIMBS = 20;         // of 32 bits, in units of 2**-298; each is an int64 that holds its carries
constexpr int WORDS = LIMBS + 1;  // and the number of values that are not finite or are 2**300 and more
constexpr int FRACTION = 298;

// out[0..20] += the values. A value adds less than 2**32 to a limb, so 2**31 values fit. Integers add up in any order.
extern "C" __global__ void exact_sum(const double* values, i64* out, i64 n) {
    __shared__ u64 words[WORDS];
    if (threadIdx.x < WORDS) words[threadIdx.x] = 0;
    __syncthreads();
    for (i64 i = first_index(); i < n; i += index_stride()) {
        u64 bits = (u64)__double_as_longlong(values[i]);
        int exponent = (int)(bits >> 52 & 0x7ff);
        u64 mantissa = bits & 0xfffffffffffffull;
        bool negative = bits >> 63;
        if (exponent >= 1023 + 300) {
            atomicAdd(words + LIMBS, 1ull);
            continue;
        }
        if (exponent > 0)
            mantissa |= 1ull << 52;
        else
            exponent = 1;  // subnormal
        int shift = exponent - 1075 + FRACTION;
        if (shift < 0) {
            // Bits below a unit are floored, which makes a negative number's magnitude larger.
            int cut = shift < -63 ? 63 : -shift;
            u64 whole = mantissa >> cut;
            mantissa = whole + (negative && whole << cut != mantissa);
            shift = 0;
        }
        u64 low = (mantissa & 0xffffffffull) << shift % 32, high = (mantissa >> 32) << shift % 32;
        high += low >> 32;
        u64 limbs[3] = {low & 0xffffffffull, high & 0xffffffffull, high >> 32};
        for (int k = 0; k < 3; k++)
            if (limbs[k]) atomicAdd(words + shift / 32 + k, negative ? 0 - limbs[k] : limbs[k]);
    }
    __syncthreads();
    if (threadIdx.x < WORDS && words[threadIdx.x]) atomicAdd((u64*)out + threadIdx.x, words[threadIdx.x]);
}

// --- AdamW (Loshchilov & Hutter 2019, algorithm 2)

// One element's update, in the order of NumpyShardOps._adamw: in fp32 both have the same bits. What NumPy computes in
// fp64 before it rounds to A comes rounded (rest1 = 1 - beta1, rest2 = 1 - beta2) or is computed in fp64 here.
__device__ inline void adamw_element(A* param, A grad, A* exp_avg, A* exp_avg_sq, double decay, A factor, A rate,
                                     double lr, A beta1, A rest1, A beta2, A rest2, A eps, A root) {
    A g = grad * factor;
    A m = *exp_avg * beta1 + g * rest1;
    A v = *exp_avg_sq * beta2 + g * g * rest2;
    A step = m / (sqrt_of(v) * root + eps) * rate;
    *exp_avg = m;
    *exp_avg_sq = v;
    *param = *param * (A)(1.0 - lr * decay) - step;
}

// bounds are (start, stop) pairs in order and decays one number for each; elements outside stay as they are.
extern "C" __global__ void adamw(A* param, const A* grad, A* exp_avg, A* exp_avg_sq, const i64* bounds,
                                 const double* decays, i64 segments, i64 n, A factor, A rate, double lr, A beta1,
                                 A rest1, A beta2, A rest2, A eps, A root) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        i64 segment = range_of(bounds, segments, i);
        if (segment < 0) continue;
        adamw_element(param + i, grad[i], exp_avg + i, exp_avg_sq + i, decays[segment], factor, rate, lr, beta1, rest1,
                      beta2, rest2, eps, root);
    }
}

// The same, and cast = param, rounded to T.
extern "C" __global__ void adamw_cast(A* param, const A* grad, A* exp_avg, A* exp_avg_sq, T* cast, const i64* bounds,
                                      const double* decays, i64 segments, i64 n, A factor, A rate, double lr, A beta1,
                                      A rest1, A beta2, A rest2, A eps, A root) {
    for (i64 i = first_index(); i < n; i += index_stride()) {
        i64 segment = range_of(bounds, segments, i);
        if (segment < 0) continue;
        adamw_element(param + i, grad[i], exp_avg + i, exp_avg_sq + i, decays[segment], factor, rate, lr, beta1, rest1,
                      beta2, rest2, eps, root);
        store(cast + i, param[i]);
    }
}

// --- checksums

__device__ inline u64 bits_of(fp16 x) { return x.bits; }
__device__ inline u64 bits_of(bf16 x) { return x.bits; }
__device__ inline u64 bits_of(float x) { return __float_as_uint(x); }
__device__ inline u64 bits_of(double x) {
    u64 bits = (u64)__double_as_longlong(x);
    return bits ^ bits >> 32;  // the top bit, a sign, would weigh 2**63 at every place and cancel
}

// out[0] += each element's bits, plus one, times an odd number mixed from its place (the finaliser of SplitMix64,
// Steele et al. 2014), modulo 2**64: NumpyShardOps._fingerprint.
extern "C" __global__ void fingerprint(const T* x, u64* out, i64 n, u64 start) {
    u64 sum = 0;
    for (i64 i = first_index(); i < n; i += index_stride()) {
        u64 weight = start + (u64)i * 0x9E3779B97F4A7C15ull;
        weight = (weight ^ weight >> 30) * 0xBF58476D1CE4E5B9ull;
        weight = (weight ^ weight >> 27) * 0x94D049BB133111EBull;
        weight = (weight ^ weight >> 31) | 1;
        sum += (bits_of(x[i]) + 1) * weight;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(out, sum);
}
