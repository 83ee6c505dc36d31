// decode_attention: softmax(scale · q Kᵀ) V of query tokens over the pages of their sequences, on CUDA cores.
//
// Thread mapping: persistent blocks share all units (schedule.cuh). Inside an item, a warp takes every
//     WARPS-th tile of STEPS · 32/LANES tokens: LANES neighbouring lanes share a token's row, so a warp's loads run
//     over neighbouring rows. Every lane keeps ROWS rows of q and of the result, its own elements of each, in registers,
//     so one read of K and V serves ROWS query heads. Running maximum, sum and result are kept per group of LANES
//     lanes, and merged when the item ends: first inside the warp, then over the warps in shared memory.
// Memory layout: K and V by strides (layout.cuh); q and out [query_tokens, num_q_heads, HEAD_DIM]; an item that several
//     blocks share leaves its parts in the workspace, which merge_partials puts together.
// Bound by: memory, up to about 4 query heads per KV head; the multiply-adds of q·k and p·v beyond.
// Why this version: it runs on compute capability 7.0 and up, any head_dim and group; sums are float32; the softmax is
//     brought up to date once per tile, not once per token; tiles that are all visible skip every mask.
//
// Constants: KV and Q (element types), HEAD_DIM, PAGE_SIZE, ROWS, THREADS, CHUNK, LANES, LOAD_BYTES (one load of K or V;
//     divides all strides and addresses; a row with its padding holds whole loads), Q_LOAD_BYTES (the same for q, whose
//     rows have no padding).
// Launch: decode_attention grid (any), block (THREADS); then merge_partials grid (the same, ROWS), block (any).

typedef Words<LOAD_BYTES>::type Load;
constexpr int VECTOR = LOAD_BYTES / sizeof(KV);              // elements of one load
constexpr int VECTORS = ceil_div<int>(HEAD_DIM, VECTOR);     // loads of a row
constexpr int LANE_VECTORS = ceil_div<int>(VECTORS, LANES);  // of which one lane has
constexpr int ELEMENTS = LANE_VECTORS * VECTOR;              // elements of a row in one lane
constexpr int TOKENS = 32 / LANES;                           // rows that a warp loads at once
constexpr int WARPS = THREADS / 32;
constexpr int STEPS = CHUNK * LANES / THREADS;               // rows that a lane takes part in per tile
constexpr int TILE = STEPS * TOKENS;                         // tokens that a warp takes at once
constexpr int LOOKUPS = PAGE_SIZE % TILE == 0 ? 1 : STEPS;   // pages that a lane looks up per tile
static_assert(LANES <= 32 && STEPS > 0 && CHUNK == WARPS * TILE, "a chunk is a tile for each warp");

// Workspace: what blocks leave for merge_partials. Part 0 of a block is the end, or the middle, of an item that an
// earlier block began; part 1 is the beginning of an item that later blocks end.
struct Opened {
    Offset target;   // row of out that part 1 belongs to; -1: there is no part 1, or no such row
    int last_block;  // the block that ends the item
};

struct Workspace {
    Opened* opened;  // [grid, ROWS]
    float2* states;  // [grid, 2, ROWS]: maximum (base 2) and sum
    float* results;  // [grid, 2, ROWS, HEAD_DIM], not yet divided by the sum

    INLINE explicit Workspace(Byte* memory) {
        const Offset rows = static_cast<Offset>(gridDim.x) * ROWS;
        opened = reinterpret_cast<Opened*>(memory);
        states = reinterpret_cast<float2*>(opened + rows);
        results = reinterpret_cast<float*>(states + 2 * rows);
    }

    INLINE static Offset row(int block, int part, int row) {
        return (static_cast<Offset>(block) * 2 + part) * ROWS + row;
    }
};

// Softmax state of ROWS rows, in base 2: the largest score, the sum of 2^(score - largest), and the sum of V under those
// weights, this lane's elements of it.
struct State {
    float top[ROWS], sum[ROWS], result[ROWS][ELEMENTS];
};

// What the query rows of an item see and where they go.
struct QueryRow {
    Offset q, target;  // row of q to read; row of out to write, -1: none
    unsigned limit;    // tokens that it sees
};

// This lane's element i of a row.
INLINE int element(int lane, int i) { return (i / VECTOR * LANES + lane) * VECTOR + i % VECTOR; }

INLINE bool has_vector(int lane, int vector) {
    return VECTORS % LANES == 0 || vector * LANES + lane < VECTORS;
}

INLINE void load_row(const Byte* row, int lane, bool wanted, Load (&loads)[LANE_VECTORS]) {
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; i++) {
        loads[i] = {};
        if (wanted && has_vector(lane, i)) loads[i] = reinterpret_cast<const Load*>(row)[i * LANES + lane];
    }
}

INLINE void unpack_row(const Load (&loads)[LANE_VECTORS], float (&x)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; i++) unpack<KV>(loads[i], x, i * VECTOR);
}

// Pages of the lane's tokens in the tile; -1 past the end.
INLINE void look_up(const int* table, unsigned token, unsigned stop, int (&pages)[LOOKUPS]) {
#pragma unroll
    for (int i = 0; i < LOOKUPS; i++) {
        const unsigned t = token + i * TOKENS;
        pages[i] = t < stop ? table[t / PAGE_SIZE] : -1;
    }
}

// Take one tile into the state. row[step] is where the lane's token of that step lies, if present[step].
// MASKED: some token is absent or not visible to some row. Otherwise nothing is tested.
template <bool MASKED>
INLINE void attend(
    const Byte* const (&row)[STEPS], const bool (&present)[STEPS], unsigned token, Offset kv_stride, int lane,
    const QueryRow* queries, const float (&q)[ROWS][ELEMENTS], State& state) {
    Load k[STEPS][LANE_VECTORS], v[STEPS][LANE_VECTORS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        load_row(row[step], lane, !MASKED || present[step], k[step]);
        load_row(row[step] + kv_stride, lane, !MASKED || present[step], v[step]);
    }
    float scores[STEPS * ROWS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float x[ELEMENTS];
        unpack_row(k[step], x);
        if (HEAD_DIM % VECTOR) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) x[i] = element(lane, i) < HEAD_DIM ? x[i] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float dot = q[r][0] * x[0];
#pragma unroll
            for (int i = 1; i < ELEMENTS; i++) dot = fmaf(q[r][i], x[i], dot);
            scores[step * ROWS + r] = dot;
        }
    }
    sum_over_lanes<LANES>(scores);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float top = state.top[r];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float& score = scores[step * ROWS + r];
            if (MASKED) score = present[step] && token + step * TOKENS < queries[r].limit ? score : -infinity();
            top = fmaxf(top, score);
        }
        const float decay = fast_exp2(state.top[r] - top);
        state.top[r] = top;
        state.sum[r] *= decay;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float& score = scores[step * ROWS + r];
            score = fast_exp2(score - top);
            state.sum[r] += score;
        }
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) state.result[r][i] *= decay;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float x[ELEMENTS];
        unpack_row(v[step], x);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            // A weight of 0 is not enough to hide a token: its V may be NaN.
            if (MASKED && !(present[step] && token + step * TOKENS < queries[r].limit)) continue;
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) state.result[r][i] = fmaf(scores[step * ROWS + r], x[i], state.result[r][i]);
        }
    }
}

// Merge the states of the warp's groups of lanes; all lanes get the result.
INLINE void merge_lanes(State& state) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float top = state.top[r];
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        const float weight = fast_exp2(state.top[r] - top);
        state.top[r] = top;
        state.sum[r] *= weight;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) state.result[r][i] *= weight;
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            state.sum[r] += __shfl_xor_sync(ALL_LANES, state.sum[r], step);
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++)
                state.result[r][i] += __shfl_xor_sync(ALL_LANES, state.result[r][i], step);
        }
    }
}

INLINE void write_element(Q* out, float* lse, Offset row, int i, float top, float sum, float result) {
    from_float(sum == 0.0f ? 0.0f : result * fast_reciprocal(sum), out[row * HEAD_DIM + i]);
    if (i == 0 && lse != nullptr) lse[row] = sum == 0.0f ? -infinity() : (top + fast_log2(sum)) * LN_2;
}

extern "C" __global__ void __launch_bounds__(THREADS, ROWS * (ELEMENTS + STEPS) <= 48 ? 3 : 2) decode_attention(
    Byte* data, Offset page_stride, Offset head_stride, Offset token_stride, Offset kv_stride, int num_pages,
    const Q* q, const int* page_table, int max_pages, const int* seq_lens, const int* query_lens,
    int sequences, int query_tokens, int num_kv_heads, int group, float scale_log2,
    Q* out, float* lse, Byte* workspace_memory) {
    __shared__ Share share;
    __shared__ Work work;
    __shared__ QueryRow queries[ROWS];
    __shared__ float2 warp_states[WARPS][ROWS];
    __shared__ float warp_results[WARPS][ROWS][HEAD_DIM];

    const Layer layer = {data, page_stride, head_stride, token_stride, kv_stride, num_pages};
    const Offset capacity = static_cast<Offset>(max_pages) * PAGE_SIZE;
    const Batch batch = {seq_lens, query_lens, sequences, query_tokens, capacity, num_kv_heads, group};
    const Workspace workspace(workspace_memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, token_of_warp = threadIdx.x % 32 / LANES;
    const int block = blockIdx.x;

    if (threadIdx.x < ROWS) workspace.opened[block * ROWS + threadIdx.x].target = -1;
    find_share(batch, share);
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) work = share.next(batch);
        __syncthreads();
        if (work.sequence < 0) return;

        if (threadIdx.x < ROWS) {
            const int length = static_cast<int>(batch.length(work.sequence)), count = batch.queries(work.sequence);
            const Offset wanted = work.first_row + threadIdx.x;
            const Offset i = smaller(wanted, static_cast<Offset>(count) * group - 1);
            const int query = static_cast<int>(i / group);
            const Offset token = work.first_query + query;
            const Offset row = (token * num_kv_heads + work.head) * group + i % group;
            const bool exists = token < query_tokens;
            queries[threadIdx.x] = {
                exists ? row : 0, exists && i == wanted ? row : -1,
                static_cast<unsigned>(larger(length - count + 1 + query, 0))};
        }
        __syncthreads();

        float q_rows[ROWS][ELEMENTS];
        State state;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Q* q_row = q + queries[r].q * HEAD_DIM;
            constexpr int Q_VECTOR = Q_LOAD_BYTES / sizeof(Q);
#pragma unroll
            for (int i = 0; i < ELEMENTS; i += Q_VECTOR) {
                Words<Q_LOAD_BYTES>::type load = {};
                if (element(lane, i) < HEAD_DIM)
                    load = *reinterpret_cast<const Words<Q_LOAD_BYTES>::type*>(q_row + element(lane, i));
                unpack<Q>(load, q_rows[r], i);
            }
            state.top[r] = LOWEST;
            state.sum[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) {
                q_rows[r][i] *= scale_log2;
                state.result[r][i] = 0.0f;
            }
        }

        const int* table = page_table + static_cast<Offset>(work.sequence) * max_pages;
        const int head = work.head;
        const unsigned stop = static_cast<unsigned>(smaller<Offset>(work.end_chunk * CHUNK, queries[ROWS - 1].limit));
        const unsigned all_see = smaller(stop, queries[0].limit);
        unsigned token = static_cast<unsigned>(work.first_chunk) * CHUNK + warp * TILE + token_of_warp;
        int pages[LOOKUPS];
        look_up(table, token, stop, pages);
        for (; token - token_of_warp < stop; token += CHUNK) {
            const Byte* row[STEPS];
            bool present[STEPS], whole = token + (STEPS - 1) * TOKENS < all_see;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const unsigned t = token + step * TOKENS;
                const bool in_pool = layer.has_page(pages[step % LOOKUPS]);
                present[step] = in_pool && t < stop;
                whole = whole && in_pool;
                row[step] = step < LOOKUPS ? layer.row(pages[step % LOOKUPS], head, t % PAGE_SIZE)
                                           : row[step - 1] + TOKENS * token_stride;
            }
            look_up(table, token + CHUNK, stop, pages);  // ahead of time: rows cannot be loaded before it is here
            if (__all_sync(ALL_LANES, whole))
                attend<false>(row, present, token, kv_stride, lane, queries, q_rows, state);
            else
                attend<true>(row, present, token, kv_stride, lane, queries, q_rows, state);
        }

        merge_lanes(state);
        if (token_of_warp == 0) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (lane == 0) warp_states[warp][r] = {state.top[r], state.sum[r]};
#pragma unroll
                for (int i = 0; i < ELEMENTS; i++)
                    if (element(lane, i) < HEAD_DIM) warp_results[warp][r][element(lane, i)] = state.result[r][i];
            }
        }
        __syncthreads();

        for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, dim = i % HEAD_DIM;
            const Offset target = queries[r].target;
            float top = LOWEST, sum = 0.0f, result = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_states[w][r].x);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float weight = fast_exp2(warp_states[w][r].x - top);
                sum = fmaf(weight, warp_states[w][r].y, sum);
                result = fmaf(weight, warp_results[w][r][dim], result);
            }
            if (work.begins && work.ends) {
                if (target >= 0) write_element(out, lse, target, dim, top, sum, result);
                continue;
            }
            const Offset place = Workspace::row(block, work.begins, r);
            workspace.results[place * HEAD_DIM + dim] = result;
            if (dim == 0) {
                workspace.states[place] = {top, sum};
                if (work.begins) workspace.opened[block * ROWS + r] = {target, work.last_block};
            }
        }
    }
}

// Thread mapping: block (b, r) merges row r of the item that block b of decode_attention began and others ended, its
// threads taking the elements in turn. Parts are taken in the order of their blocks, so the result is always the same.
extern "C" __global__ void merge_partials(Q* out, float* lse, Byte* workspace_memory) {
    const Workspace workspace(workspace_memory);
    const int block = blockIdx.x, r = blockIdx.y;
    const Opened opened = workspace.opened[block * ROWS + r];
    if (opened.target < 0) return;
    const Offset first = Workspace::row(block, 1, r);
    float top = workspace.states[first].x;
#pragma unroll 4
    for (int b = block + 1; b <= opened.last_block; b++)
        top = fmaxf(top, workspace.states[Workspace::row(b, 0, r)].x);
    for (int dim = threadIdx.x; dim < HEAD_DIM; dim += blockDim.x) {
        float weight = fast_exp2(workspace.states[first].x - top);
        float sum = weight * workspace.states[first].y;
        float result = weight * workspace.results[first * HEAD_DIM + dim];
#pragma unroll 4
        for (int b = block + 1; b <= opened.last_block; b++) {
            const Offset part = Workspace::row(b, 0, r);
            weight = fast_exp2(workspace.states[part].x - top);
            sum = fmaf(weight, workspace.states[part].y, sum);
            result = fmaf(weight, workspace.results[part * HEAD_DIM + dim], result);
        }
        write_element(out, lse, opened.target, dim, top, sum, result);
    }
}
