// Rows of a table taken by token, and their gradient.

// out[n] = table[tokens[n]]; a row of NaN for a token outside [0, vocabulary). Blocks share the rows among them.
extern "C" __global__ void embedding(const T* table, const i64* tokens, T* out, i64 count, i64 width, i64 vocabulary) {
    for (i64 n = blockIdx.x; n < count; n += gridDim.x) {
        i64 token = tokens[n];
        bool inside = token >= 0 && token < vocabulary;
        for (i64 c = threadIdx.x; c < width; c += BLOCK) {
            if (inside)
                out[n * width + c] = table[token * width + c];
            else
                store(out + n * width + c, not_a_number());
        }
    }
}

// dtable[tokens[n]] += dy[n] in the order of n. One block a position; the block of a token's first position adds all
// rows of that token in A and rounds once, so no two blocks write one row and no order depends on timing.
extern "C" __global__ void embedding_backward(const i64* tokens, const T* dy, G* dtable, i64 count, i64 width,
                                              i64 vocabulary) {
    __shared__ int matches[BLOCK];
    i64 n = blockIdx.x;
    i64 token = tokens[n];
    if (token < 0 || token >= vocabulary) return;

    bool earlier = false;
    for (i64 i = threadIdx.x; i < n && !earlier; i += BLOCK) earlier = tokens[i] == token;
    if (__syncthreads_or(earlier)) return;

    for (i64 start = 0; start < width; start += BLOCK) {
        i64 c = start + threadIdx.x;
        A sum = c < width ? (A)load(dtable + token * width + c) : (A)0;
        for (i64 base = n; base < count; base += BLOCK) {
            i64 position = base + threadIdx.x;
            int match = position < count && tokens[position] == token;
            if (!__syncthreads_or(match)) continue;
            matches[threadIdx.x] = match;
            __syncthreads();
            for (int i = 0; i < BLOCK; i++)
                if (matches[i] && c < width) sum += load(dy + (base + i) * width + c);
            // The next __syncthreads_or keeps matches from being written while they are read.
        }
        if (c < width) store(dtable + token * width + c, sum);
    }
}
