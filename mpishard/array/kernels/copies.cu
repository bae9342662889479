// Copies between any two floating types T and G, and fills. A grid of any size is right.

template <typename X>
__device__ inline void copy_element(const X* x, X* out) { *out = *x; }  // bit for bit, NaN too
template <typename X, typename Y>
__device__ inline void copy_element(const X* x, Y* out) { store(out, load(x)); }

extern "C" __global__ void copy_cast(const T* x, G* out, i64 n) {
    for (i64 i = first_index(); i < n; i += index_stride()) copy_element(x + i, out + i);
}

extern "C" __global__ void copy_strided(const T* x, G* out, i64 d0, i64 d1, i64 d2, i64 d3, i64 xs0, i64 xs1, i64 xs2,
                                        i64 xs3, i64 os0, i64 os1, i64 os2, i64 os3) {
    i64 n = d0 * d1 * d2 * d3;
    for (i64 i = first_index(); i < n; i += index_stride()) {
        Place at = place(i, n, d1, d2, d3);
        copy_element(x + at.offset(xs0, xs1, xs2, xs3), out + at.offset(os0, os1, os2, os3));
    }
}

extern "C" __global__ void fill_strided(T* out, A value, i64 d0, i64 d1, i64 d2, i64 d3, i64 os0, i64 os1, i64 os2,
                                        i64 os3) {
    i64 n = d0 * d1 * d2 * d3;
    for (i64 i = first_index(); i < n; i += index_stride())
        store(out + place(i, n, d1, d2, d3).offset(os0, os1, os2, os3), value);
}
