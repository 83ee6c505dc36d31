// merge_states: attention over the union of two disjoint sets of tokens, from the results over each.
//
// Thread mapping: one warp per row; its lanes take the row's elements in turn.
// Memory layout: a, b, out [rows, head_dim]; lse [rows], natural logarithm; all contiguous.
// Bound by: memory.
// Why this version: the two weights are uniform in a warp, and any head_dim is served by one loop.
//
// Constants: T (element type).
// Launch: grid (rows / warps), block (32 · warps).

extern "C" __global__ void merge_states(
    const T* a, const float* lse_a, const T* b, const float* lse_b, T* out, float* lse, Offset rows, int head_dim) {
    const Offset row = static_cast<Offset>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const float log_a = lse_a[row], log_b = lse_b[row];
    const float top = larger(fmaxf(log_a, log_b), LOWEST);  // two empty sets: weights 0, not NaN
    const float weight_a = fast_exp2((log_a - top) * LOG2_E), weight_b = fast_exp2((log_b - top) * LOG2_E);
    const float sum = weight_a + weight_b;
    const float scale = sum == 0.0f ? 0.0f : fast_reciprocal(sum);
    for (int i = threadIdx.x % 32; i < head_dim; i += 32) {
        const Offset at = row * head_dim + i;
        // What an empty set brings is not looked at: it may be NaN.
        const float part_a = weight_a == 0.0f ? 0.0f : weight_a * to_float(a[at]);
        const float part_b = weight_b == 0.0f ? 0.0f : weight_b * to_float(b[at]);
        from_float((part_a + part_b) * scale, out[at]);
    }
    if (threadIdx.x % 32 == 0) lse[row] = sum == 0.0f ? -infinity() : top + fast_log2(sum) * LN_2;
}
