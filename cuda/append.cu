// append: store K and V of new tokens in their slots, and zeros in the padding of their rows.
//
// Thread mapping: one thread block per token; its threads take the COPY_BYTES-wide pieces of (head, K|V, row) in turn,
//     so neighbouring threads write neighbouring bytes.
// Memory layout: k and v are [tokens, heads, elements] with any token and head strides; the pool's rows lie where its
//     strides say. Values are copied bit by bit: the caller has converted them.
// Bound by: memory; a decode step writes so little that it is bound by the launch.
// Why this version: one uniform slot check per block, no division at run time (sizes are constants), and the widest
//     copy that all addresses allow.
//
// Constants: PAGE_SIZE, ROW_BYTES (head_dim elements), PADDING_BYTES, COPY_BYTES (divides both, all strides and
//     all addresses).
// Launch: grid (tokens), block (any).

typedef Words<COPY_BYTES>::type Piece;
constexpr int PIECES = (ROW_BYTES + PADDING_BYTES) / COPY_BYTES;

extern "C" __global__ void append(
    Byte* data, Offset page_stride, Offset head_stride, Offset token_stride, Offset kv_stride, int num_pages,
    const Byte* k, Offset k_token_stride, Offset k_head_stride,
    const Byte* v, Offset v_token_stride, Offset v_head_stride,
    const Offset* slots, int num_kv_heads) {
    const Layer layer = {data, page_stride, head_stride, token_stride, kv_stride, num_pages};
    const Offset token = blockIdx.x;
    Byte* const first = layer.row_of_slot(slots[token], PAGE_SIZE, 0);
    if (first == nullptr) return;
    const Byte* const sources[2] = {k + token * k_token_stride, v + token * v_token_stride};
    for (int i = threadIdx.x; i < num_kv_heads * 2 * PIECES; i += blockDim.x) {
        const int head = i / (2 * PIECES), rest = i % (2 * PIECES);
        const bool is_v = rest >= PIECES;
        const int byte = rest % PIECES * COPY_BYTES;
        Piece piece = {};
        if (byte < ROW_BYTES) {
            const Byte* source = is_v ? sources[1] + head * v_head_stride : sources[0] + head * k_head_stride;
            piece = *reinterpret_cast<const Piece*>(source + byte);
        }
        *reinterpret_cast<Piece*>(first + head * head_stride + (is_v ? kv_stride : 0) + byte) = piece;
    }
}
