// gather: read stored tokens back into k and v.
//
// Thread mapping, memory layout, bound: those of append.cu, the other way round; k and v are contiguous
//     [tokens, heads, elements]. A slot that the pool does not have gives zeros.
// Why this version: reading back is for tests, checkpoints and transfers; what serves append serves it.
//
// Constants: PAGE_SIZE, ROW_BYTES, COPY_BYTES (divides ROW_BYTES, all strides and all addresses).
// Launch: grid (tokens), block (any).

typedef Words<COPY_BYTES>::type Piece;
constexpr int PIECES = ROW_BYTES / COPY_BYTES;

extern "C" __global__ void gather(
    Byte* data, Offset page_stride, Offset head_stride, Offset token_stride, Offset kv_stride, int num_pages,
    const Offset* slots, int num_kv_heads, Byte* k, Byte* v) {
    const Layer layer = {data, page_stride, head_stride, token_stride, kv_stride, num_pages};
    const Offset token = blockIdx.x;
    const Byte* const first = layer.row_of_slot(slots[token], PAGE_SIZE, 0);
    for (int i = threadIdx.x; i < num_kv_heads * 2 * PIECES; i += blockDim.x) {
        const int head = i / (2 * PIECES), rest = i % (2 * PIECES);
        const bool is_v = rest >= PIECES;
        const int byte = rest % PIECES * COPY_BYTES;
        Piece piece = {};
        if (first != nullptr)
            piece = *reinterpret_cast<const Piece*>(first + head * head_stride + (is_v ? kv_stride : 0) + byte);
        Byte* const target = (is_v ? v : k) + (token * num_kv_heads + head) * ROW_BYTES + byte;
        *reinterpret_cast<Piece*>(target) = piece;
    }
}
