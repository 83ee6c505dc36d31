// How persistent thread blocks share a ragged batch, on the device alone.
//
// A sequence with n query tokens has n · group rows of q per KV head. ROWS of them make a pass, which reads K and V
// once. An item is (sequence, KV head, pass); it is cut into chunks of CHUNK tokens, at least one, and one chunk of one
// item is a unit. All units stand in one line, sequence by sequence, and each block takes an equal run of neighbours.
// So a block has whole items, but for its first, which an earlier block may have begun, and its last.
//
// Nothing depends on the order in which blocks run, and nothing is read but lengths: the same launch stays balanced when
// they change.
//
// Constants: ROWS, CHUNK, THREADS (of a block).

struct Batch {
    const int* seq_lens;
    const int* query_lens;  // null: one query token per sequence
    int sequences, query_tokens;
    Offset capacity;  // tokens that a row of the page table holds
    int num_kv_heads, group;

    INLINE unsigned length(int sequence) const {
        return static_cast<unsigned>(smaller(larger<Offset>(seq_lens[sequence], 0), capacity));
    }

    INLINE int queries(int sequence) const {
        return query_lens == nullptr ? 1 : smaller(larger(query_lens[sequence], 0), query_tokens);
    }

    INLINE Offset chunks(int sequence) const { return ceil_div<Offset>(larger(length(sequence), 1u), CHUNK); }

    INLINE Offset passes(int sequence) const {
        return ceil_div<Offset>(static_cast<Offset>(queries(sequence)) * group, ROWS);
    }

    INLINE Offset units(int sequence) const { return num_kv_heads * passes(sequence) * chunks(sequence); }
};

// Units and query tokens before something.
struct Count {
    Offset units, queries;
};

// Sum of the counts of the threads before this one; total becomes the sum over the block. All threads must call it.
INLINE Count sum_before(Count mine, Count& total) {
    __shared__ Count warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Count sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Offset units = __shfl_up_sync(ALL_LANES, sum.units, step);
        const Offset queries = __shfl_up_sync(ALL_LANES, sum.queries, step);
        if (lane >= step) sum = {sum.units + units, sum.queries + queries};
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    Count before = {sum.units - mine.units, sum.queries - mine.queries};
    total = {0, 0};
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) before = {before.units + warps[i].units, before.queries + warps[i].queries};
        total = {total.units + warps[i].units, total.queries + warps[i].queries};
    }
    __syncthreads();
    return before;
}

// A place in the line of units.
struct Cursor {
    int sequence;
    Offset unit;         // inside the sequence
    Offset first_query;  // query tokens of the sequences before
};

// What a block works on from one synchronization to the next: neighbouring chunks of one item.
struct Work {
    int sequence;        // -1: nothing is left
    int head;
    Offset first_query;  // query tokens of the sequences before
    Offset first_row;    // of the sequence's rows of q for that head
    Offset first_chunk, end_chunk;
    bool begins, ends;   // the item, rather than going on with it or leaving its end to later blocks
    int last_block;      // the one that ends the item
};

// What a block has yet to do.
struct Share {
    Offset unit, end, per_block;
    Cursor cursor;

    // Take the next piece of work off. For one thread: the share lies in shared memory, where it costs no registers.
    INLINE Work next(const Batch& batch) {
        if (unit >= end) return {-1};
        while (cursor.unit == batch.units(cursor.sequence)) {
            cursor.first_query += batch.queries(cursor.sequence);
            cursor.sequence++;
            cursor.unit = 0;
        }
        const Offset chunks = batch.chunks(cursor.sequence), passes = batch.passes(cursor.sequence);
        const Offset item = cursor.unit / chunks, first = cursor.unit % chunks;
        const Offset taken = smaller(chunks - first, end - unit), item_end = unit - first + chunks;
        const Work work = {
            cursor.sequence, static_cast<int>(item / passes), cursor.first_query, item % passes * ROWS, first,
            first + taken, first == 0, first + taken == chunks, static_cast<int>((item_end - 1) / per_block)};
        unit += taken;
        cursor.unit += taken;
        return work;
    }
};

// This block's share of the batch, in shared memory. All threads must call it; whoever reads the share must
// synchronize first.
INLINE void find_share(const Batch& batch, Share& share) {
    Count mine = {0, 0}, total;
    for (int sequence = threadIdx.x; sequence < batch.sequences; sequence += THREADS) mine.units += batch.units(sequence);
    sum_before(mine, total);
    const Offset per_block = ceil_div<Offset>(total.units, gridDim.x);
    const Offset first = smaller(blockIdx.x * per_block, total.units), end = smaller(first + per_block, total.units);
    if (threadIdx.x == 0) share = {first, end, per_block, {}};
    Count passed = {0, 0};
    for (int base = 0; first < end && passed.units <= first; base += THREADS) {
        const int sequence = base + threadIdx.x;
        mine = {0, 0};
        if (sequence < batch.sequences) mine = {batch.units(sequence), batch.queries(sequence)};
        const Count before = sum_before(mine, total);
        const Offset inside = first - passed.units - before.units;
        if (inside >= 0 && inside < mine.units) share.cursor = {sequence, inside, passed.queries + before.queries};
        passed = {passed.units + total.units, passed.queries + total.queries};
    }
}
