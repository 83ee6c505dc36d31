// Where rows lie: any layout is five 64-bit numbers. A row is one token's K or V of one head, elements side by side.

struct Layer {
    Byte* data;  // row of page 0, head 0, token 0, K
    Offset page_stride, head_stride, token_stride, kv_stride;
    int num_pages;

    INLINE bool has_page(int page) const { return static_cast<unsigned>(page) < static_cast<unsigned>(num_pages); }

    // The K row; V lies kv_stride further. token counts inside the page.
    INLINE Byte* row(int page, int head, unsigned token) const {
        return data + page * page_stride + head * head_stride + token * token_stride;
    }

    // The same from a slot, page · page_size + token; null if the pool has no such slot.
    INLINE Byte* row_of_slot(Offset slot, Offset page_size, int head) const {
        if (slot < 0 || slot >= num_pages * page_size) return nullptr;
        return row(static_cast<int>(slot / page_size), head, static_cast<unsigned>(slot % page_size));
    }
};
