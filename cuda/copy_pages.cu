// copy_pages: copy whole pages inside a pool, in every layer, pair after pair.
//
// Thread mapping: one thread per COPY_BYTES-wide column of a page (x) and layer (y); it walks through the pairs.
// Memory layout: [num_layers, num_pages, page_stride] bytes.
// Bound by: memory.
// Why this version: a byte only ever moves to the same place of another page, so a thread that takes the pairs in
//     order keeps their order for its column, and one launch does everything.
//
// Constants: COPY_BYTES (divides page_stride and the address of data).
// Launch: grid (columns / block, num_layers), block (any).

typedef Words<COPY_BYTES>::type Piece;

extern "C" __global__ void copy_pages(
    Byte* data, Offset page_stride, int num_pages, const Offset* sources, const Offset* destinations, int pairs) {
    const Offset column = (static_cast<Offset>(blockIdx.x) * blockDim.x + threadIdx.x) * COPY_BYTES;
    if (column >= page_stride) return;
    Byte* const layer = data + blockIdx.y * (num_pages * page_stride) + column;
    for (int i = 0; i < pairs; i++) {
        const Offset source = sources[i], destination = destinations[i];
        if (source < 0 || source >= num_pages || destination < 0 || destination >= num_pages) continue;
        *reinterpret_cast<Piece*>(layer + destination * page_stride) =
            *reinterpret_cast<const Piece*>(layer + source * page_stride);
    }
}
