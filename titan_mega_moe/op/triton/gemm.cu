// The six grouped matrix products of the layer, for Hopper (sm_90a), with the sums over a token's experts and their
// way home beside them. Compiled at first use by NVRTC: no headers.
//
// One persistent kernel body, six modes. A block is three warpgroups: one producer that fills a ring of shared-memory
// stages, and two consumers that multiply (wgmma, 64 x 256 each, so a tile is 128 x 256). A consumer rounds its sums to
// bf16 and frees the accumulators; where registers allow it stores them while the next tile's products run.
//
// Row space: the routed rows of this rank sorted by local expert, then by the ring distance of the source rank, then
// by token; each expert starts at a multiple of 128. rows[] maps a row to source rank * t_max + token, or to -1 where it
// only pads. The tile list names expert, first row, valid rows and chunk of every 128-row tile; a tile's chunk is the
// largest ring distance in it, and the list ascends by chunk. Its length is read from device memory.
//
//   mode            out                     A operand (rows)        B operand            K     epilogue
//   GATE_UP         sh[R,F] (g,u kept)      x gathered              w1 | w3 [e,F,D]      D     s * silu(g) * u
//   DOWN            o[R,D]                  sh                      w2 [e,D,F]           F     none; counts tiles
//   DOWN_BWD        dg,du[R,F]              dy gathered             w2 [e,D,F] ^T        D     SwiGLU's derivative
//   GATE_UP_BWD     dx[R,D]                 dg then du              w1 then w3 ^T        2F    none; counts tiles
//   DW13            dw1,dw3 [e,F,D]         x^T gathered            dg or du             rows  transposed
//   DW2             dw2 [e,D,F]             dy^T gathered           sh                   rows  none
//
// Gathered rows go through cp.async, all else through TMA. Tiles with rows of a peer wait, in the producer only, for
// that peer's flag, set after its rows landed.
// In DOWN and GATE_UP_BWD the producer is one thread, and its group's other three warps combine: sum a token's rows of
// this rank. Tokens are handed out by counters, so the work goes on from kernel to kernel without a seam:
//   DOWN, GATE_UP_BWD      take the peers' tiles first, so that these warps can sum the peers' tokens as soon as their
//                          tiles are done, and store the sums to the peers; they stop when the block's tiles are done
//   combine_rest           does what is left of that in a backward, before the weight gradients
//   combine                the same in a forward; then this rank's own tokens, adding what the peers sent

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

enum Mode { GATE_UP, DOWN, DOWN_BWD, GATE_UP_BWD, DW13, DW2 };

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BOX = 64;                // columns of one 128-byte swizzled box
constexpr int BOX_BYTES = 16 * BOX * 2;  // a warp's 16 rows of one output box
constexpr int STAGING = STAGES * STAGE_BYTES, BARRIERS = STAGING + 8 * 2 * BOX_BYTES, STOP = BARRIERS + 2 * 8 * STAGES;
constexpr int SUB = 1024;    // tokens whose sums share a flag
constexpr int TICKET = 4;    // tokens of a peer that a warp takes at a time

struct __align__(64) TensorMap { u64 words[16]; };

struct Params {
    TensorMap a0, a1, b0, b1, c0, c1;
    const u8* own;           // [T, D] bf16: this rank's x or dy
    const u8* recv;          // [EP, t_max, D] bf16: the peers'
    const u8* zeros;         // [D] bf16
    const int* rows;         // [R] source rank * t_max + token, or -1
    const float* scores;     // [R] router scores, 0 where a row pads
    const int4* tiles;       // expert, first row, valid rows, chunk
    const int* num_tiles;    // [1]
    const int* expert_rows;  // [e, 2] first row and number of rows
    uint4* gate_up;          // kept g and u, bf16, in the order the consumers' registers hold them
    float* dscores;          // [F / 64, R] partial row sums of h * dh
    u32* done;               // [EP] warps that have stored their part of a tile of that chunk
    const u32* landed;       // [EP] epoch at which the rows of the source at that distance last landed
    const u32* epoch;        // [1]
    u32* error;              // [4] code, chunk, wanted, seen (host memory)
    // The combine: sums over a token's rows of this rank.
    const u8* partial_rows;    // [R, D] bf16: o or dx
    const int* row_of;         // [EP, t_max, K] row of a (source, token, slot), or -1
    const int* tokens;         // [EP] tokens of each rank
    const int* tiles_of;       // [EP] tiles of each chunk
    u32* tickets;              // [EP] next tokens of the rank at that distance
    u32* summed;               // [EP, subs] tokens whose sums have been sent
    const u64* peers;          // [EP] each rank's symmetric buffer
    const long long* ids;      // [T, K] global expert ids of this rank's tokens
    const u32* returned;       // [EP, subs] epoch at which the sums of the rank at that distance last landed
    u8* out;                   // [T, D] bf16: y or dx
    float* dscores_out;        // [T, K]
    u64 sums_offset, dscores_offset, returned_offset;  // bytes into a symmetric buffer: sums [EP, t_max, D], [t_max, K], flags [EP, subs]
    u64 timeout_ns;
    int D, F, experts, rank, t_max, ep_size, top_k, max_rows, keep, subs, backward;
};

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// The same barrier in another block of the cluster.
DEVICE u32 of_block(u32 bar, u32 block) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(bar), "r"(block));
    return r;
}
DEVICE void barrier_arrive_remote(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void tma_load(const TensorMap& map, u32 dst, u32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
                 "l"(&map), "r"(bar), "r"(x), "r"(y)
                 : "memory");
}
DEVICE void tma_load(const TensorMap& map, u32 dst, u32 bar, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// both: to the same place of both blocks of the cluster, each of which counts the bytes on its own barrier.
DEVICE void tma_load(const TensorMap& map, u32 dst, u32 bar, int x, int y, int z, bool both) {
    if (!both) return tma_load(map, dst, bar, x, y, z);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
                 "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((unsigned short)3)
                 : "memory");
}
DEVICE void tma_load(const TensorMap& map, u32 dst, u32 bar, int x, int y, bool both) {
    if (!both) return tma_load(map, dst, bar, x, y);
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"(&map), "r"(bar), "r"(x), "r"(y), "h"((unsigned short)3)
                 : "memory");
}
DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 src, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(src), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 src, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(src), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
DEVICE void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
DEVICE void store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

DEVICE void load_shared(u32 (&v)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
}

// 16 bytes from global to shared memory.
DEVICE void copy16(u32 dst, const u8* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
DEVICE void copy_arrive(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory"); }

DEVICE void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// 128-byte swizzle. K-major: rows of 64 k, groups of 8 rows 1024 bytes apart. MN-major: chunks of 64 m (or n) 8192
// bytes apart, each 64 k-rows of 128 bytes, groups of 8 k-rows 1024 bytes apart.
DEVICE u64 descriptor(u32 address, bool mn_major) {
    u64 leading = mn_major ? 8192 >> 4 : 1;
    return (u64)((address & 0x3FFFF) >> 4) | leading << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

template <int TRANS_A, int TRANS_B>
DEVICE void wgmma_m64n256k16(float (&d)[128], u64 desc_a, u64 desc_b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B));
}

DEVICE u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE float low(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
DEVICE float sigmoid(float x) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
    return fmaf(0.5f, t, 0.5f);
}

DEVICE u32 load_relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

enum Phase { NONE, ROUTING, DISPATCH, COMBINE };  // as in symm_buffer.py

// Waits until a flag has reached `wanted`. Bounded: after the time limit it records phase and ring distance for the host
// and goes on, so that the grid always ends; once an error is recorded nothing waits any more.
DEVICE void wait_flag(const u32* flag, u32 wanted, int phase, int distance, u32* error, u64 timeout_ns) {
    u64 start = 0;
    u32 seen, turns = 0;
    // Polls relaxed: an acquiring load would empty the L1 cache at every turn.
    while ((int)((seen = load_relaxed(flag)) - wanted) < 0) {
        __nanosleep(100);
        // Host memory is far away: look there seldom.
        if (++turns % 1024 == 0 && *(volatile u32*)error != NONE) return;
        if (start == 0) start = now_ns();
        if (now_ns() - start > timeout_ns) {
            if (*(volatile u32*)error != NONE) return;
            error[1] = distance;
            error[2] = wanted;
            error[3] = seen;
            __threadfence_system();
            *(volatile u32*)error = phase;
            return;
        }
    }
    __threadfence_system();
}

template <int MODE>
struct Shape {
    static constexpr bool WEIGHT = MODE == DW13 || MODE == DW2;
    static constexpr bool SWIGLU = MODE == GATE_UP || MODE == DOWN_BWD;
    static constexpr bool GATHER = SWIGLU || WEIGHT;
    static constexpr u32 TMA_BYTES = GATHER ? B_BYTES : STAGE_BYTES;
    static constexpr int PRODUCER_REGISTERS = GATHER ? 56 : 72, CONSUMER_REGISTERS = GATHER ? 224 : 216;
    static constexpr bool B_MN = WEIGHT || MODE == DOWN_BWD || MODE == GATE_UP_BWD;
    static constexpr bool DESCENDING = MODE == DOWN || MODE == GATE_UP_BWD;  // peers' rows first: their sums travel
    // SwiGLU's epilogues need too many registers to run beside the next tile's products.
    static constexpr bool DEFERS = !SWIGLU;
};

// What one tile multiplies: its expert, first row, columns and number of 64-deep steps; whether both blocks of the cluster
// take the same B. m: row block of a weight gradient.
struct Tile { int expert, row, valid, chunk, n, m, steps, same_b; };

// The tiles of a cluster's two blocks: one column block of two neighbours in the tile list, or of two row blocks of one
// expert's weight gradient (DW13's transposed; dw1's column blocks, then dw3's). Cluster c takes pairs c, c + clusters, ...
template <int MODE>
struct Schedule {
    int tiles_n, tiles_m, total, count, first, stride, half;
    const Params& p;
    DEVICE Schedule(const Params& params) : first(blockIdx.x / 2), stride(gridDim.x / 2), half(cluster_rank()), p(params) {
        int width = Shape<MODE>::WEIGHT || Shape<MODE>::SWIGLU ? p.F : p.D;
        int block = MODE == GATE_UP ? BN / 2 : BN;
        tiles_n = (width + block - 1) / block * (MODE == DW13 ? 2 : 1);
        if (Shape<MODE>::WEIGHT) {
            tiles_m = (p.D + BM - 1) / BM;
            total = p.experts * ((tiles_m + 1) / 2) * tiles_n;
        } else {
            count = *p.num_tiles;
            total = (count + 1) / 2 * tiles_n;
        }
    }
    DEVICE Tile operator[](int i) const {
        Tile t;
        t.n = i % tiles_n;
        const int pair = i / tiles_n;
        t.chunk = 0;
        t.m = 0;
        t.same_b = 1;
        if (Shape<MODE>::WEIGHT) {
            const int pairs = (tiles_m + 1) / 2;
            t.m = 2 * (pair % pairs) + half;
            t.expert = pair / pairs;
            t.row = p.expert_rows[2 * t.expert];
            t.valid = p.expert_rows[2 * t.expert + 1];
            t.steps = (t.valid + BK - 1) / BK;
        } else {
            const bool alone = 2 * pair + 1 >= count;  // the last of an odd number: the second block has no rows
            const int mine = 2 * pair + (alone ? 0 : half), other = alone ? mine : mine ^ 1;
            const int4 r = p.tiles[Shape<MODE>::DESCENDING ? count - 1 - mine : mine];
            t.same_b = r.x == p.tiles[Shape<MODE>::DESCENDING ? count - 1 - other : other].x;
            t.expert = r.x; t.row = r.y; t.valid = r.z; t.chunk = r.w;
            if (alone && half) t.valid = 0, t.chunk = -1;
            t.steps = (MODE == DOWN ? p.F : MODE == GATE_UP_BWD ? 2 * p.F : p.D) / BK;
        }
        return t;
    }
};

// DOWN_BWD's extra steps for column block n, each bringing the kept g and u of 64 columns for the epilogue.
DEVICE int extra_steps(const Params& p, int n) { return p.F - n * BN >= BN ? 4 : (p.F - n * BN) / BOX; }

// Where the kept g and u of the 64 rows from `row` x 128 columns lie: 16 vectors of 16 bytes a thread, g in
// the first 8, u in the last 8, vector v of all 128 threads together.
constexpr u32 KEPT_BYTES = 4 * 128 * 16;
DEVICE uint4* kept_block(const Params& p, int row, int f_tiles, int f) {
    return p.gate_up + ((u64)(row / 64) * f_tiles + f) * 2048;
}

// Where row id (source rank * t_max + token) lies.
DEVICE const u8* source_row(const Params& p, int id) {
    const int own = id - p.rank * p.t_max;
    const bool is_own = (u32)own < (u32)p.t_max;
    return (is_own ? p.own : p.recv) + (u64)(u32)(is_own ? own : id) * (u32)(p.D * 2);
}

// Fills the stages: thread 0 through TMA, and where rows are gathered all 128 threads.
template <int MODE>
DEVICE void produce(const Params& p, u32 smem, const Schedule<MODE>& schedule) {
    using S = Shape<MODE>;
    const int thread = threadIdx.x;
    const u32 full = smem + BARRIERS, empty = full + 8 * STAGES;
    const int f_tiles = (p.F + BM - 1) / BM;
    int confirmed = 0;
    u32 it = 0;
    // Until the rows of all sources up to that distance have landed.
    auto await = [&](int chunk) {
        if (chunk <= confirmed) return;
        if (thread == 0)
            for (int c = confirmed + 1; c <= chunk; ++c) wait_flag(p.landed + c, *p.epoch, DISPATCH, c, p.error, p.timeout_ns);
        asm volatile("bar.sync 1, 128;" ::: "memory");
        confirmed = chunk;
    };
    // A warp gathers 4 lines of 128 bytes at once, 8 lanes each, LINES in all. A line is a row of the tile; in a weight
    // gradient it is half of one of this step's 64 rows. Rows that only pad are read from a row of zeros.
    constexpr int LINES = (S::WEIGHT ? BK : BM) / 4;
    const int warp = thread / 32, lane = lane_id(), line = warp * LINES + lane / 8;
    const u32 line_offset = line * 128 + ((lane % 8 ^ line % 8) << 4);
    auto row_at = [&](int id) { return id < 0 ? p.zeros : source_row(p, id); };
    // SwiGLU's products gather the same rows in all steps of a tile: a lane keeps the addresses of its lines.
    int ids[S::SWIGLU ? LINES / 4 : 1];
    const u8* source[S::SWIGLU ? LINES / 4 : 1];
    auto fetch = [&](const Tile& t) {
#pragma unroll
        for (int j = 0; j < LINES / 4; ++j) ids[j] = p.rows[t.row + line + 4 * j];
    };
    // A weight gradient's rows differ from step to step. Their ids are fetched for two steps at once, two to four steps
    // ahead and over tiles' ends, and each lane makes the address of one row for its warp.
    Tile ahead{};
    int ahead_i = schedule.first, ahead_k = 0, column = 0;
    u64 row = 0;
    u32 second_half = 0;
    auto fetch_ahead = [&] {
        while (ahead_i < schedule.total && ahead_k >= ahead.steps) {
            ahead_i += schedule.stride;
            ahead_k = 0;
            if (ahead_i < schedule.total) ahead = schedule[ahead_i];
        }
        if (ahead_i >= schedule.total) return;
        column = ahead.m * BM < p.D ? ahead.m * BM : 0;  // beyond D nothing is stored: anything will do
        // Behind the last step nothing is defined, and nothing is read from there.
        ids[0] = p.rows[ahead.row + (ahead_k + lane / LINES) * BK + warp * LINES + lane % LINES];
        ahead_k += 2;
    };
    auto aim = [&] {
        row = (u64)(row_at(ids[0]) + column * 2);
        second_half = column + 64 < p.D ? 128 : 0;
    };
    Tile next{};
    if (schedule.first < schedule.total) {
        next = schedule[schedule.first];
        if (S::SWIGLU) fetch(next);
        if (MODE == DW13) await(p.ep_size - 1);
    }
    if (S::WEIGHT) {
        ahead = next;
        fetch_ahead();
        aim();
        fetch_ahead();
    }
    for (int i = schedule.first; i < schedule.total; i += schedule.stride) {
        const Tile t = next;
        if (S::SWIGLU) {
            await(t.chunk);
#pragma unroll
            for (int j = 0; j < LINES / 4; ++j) source[j] = row_at(ids[j]) + lane % 8 * 16;
        }
        if (i + schedule.stride < schedule.total) {
            next = schedule[i + schedule.stride];
            if (S::SWIGLU) fetch(next);
        }
        for (int k = 0; k < t.steps; ++k) {
            const u32 stage = it % STAGES, a = smem + stage * STAGE_BYTES, b = a + A_BYTES, bar = full + 8 * stage;
            barrier_wait(empty + 8 * stage, ((it / STAGES) & 1) ^ 1);
            if (thread == 0) {
                barrier_expect(bar, S::TMA_BYTES);
                const bool second = MODE == DW13 ? t.n >= schedule.tiles_n / 2 : k * BK >= p.F;  // du, or du and w3
                const int depth = k * BK - (second ? p.F : 0), of_n = t.n - (MODE == DW13 && second ? schedule.tiles_n / 2 : 0);
                if (MODE == DOWN) tma_load(p.a0, a, bar, k * BK, t.row);
                if (MODE == GATE_UP_BWD) tma_load(second ? p.a1 : p.a0, a, bar, depth, t.row);
                // Half h of B; where both blocks want the same, each fetches one half for both.
                auto load_b = [&](int h, bool both) {
                    const u32 dst = b + h * (B_BYTES / 2);
                    if (MODE == GATE_UP) tma_load(h ? p.b1 : p.b0, dst, bar, k * BK, t.n * BM, t.expert, both);
                    if (MODE == DOWN) tma_load(p.b0, dst, bar, k * BK, t.n * BN + h * 128, t.expert, both);
#pragma unroll
                    for (int c = 0; S::B_MN && c < 2; ++c) {
                        const int n = of_n * BN + h * 128 + 64 * c;
                        if (MODE == DOWN_BWD) tma_load(p.b0, dst + 8192 * c, bar, n, k * BK, t.expert, both);
                        if (MODE == GATE_UP_BWD) tma_load(second ? p.b1 : p.b0, dst + 8192 * c, bar, n, depth, t.expert, both);
                        if (MODE == DW2) tma_load(p.b0, dst + 8192 * c, bar, n, t.row + k * BK, both);
                        if (MODE == DW13) tma_load(second ? p.b1 : p.b0, dst + 8192 * c, bar, n, t.row + k * BK, both);
                    }
                };
                if (t.same_b) {
                    load_b(schedule.half, true);
                } else {
                    load_b(0, false);
                    load_b(1, false);
                }
            }
            if (S::GATHER) {
#pragma unroll
                for (int j = 0; j < LINES / 4; ++j) {
                    const u32 dst = (a + line_offset + j * 512) ^ (j % 2 * 64);  // lines 4 apart differ in the swizzle
                    if (S::SWIGLU) {
                        copy16(dst, source[j] + k * BK * 2);
                    } else {
                        const u8* from = (const u8*)__shfl_sync(~0u, row, k % 2 * LINES + 4 * j + lane / 8) + lane % 8 * 16;
                        copy16(dst, from);
                        copy16(dst + 8192, from + second_half);
                    }
                }
                copy_arrive(bar);
                if (S::WEIGHT && (k % 2 || k + 1 == t.steps)) {
                    aim();
                    fetch_ahead();
                }
            }
            ++it;
        }
        for (int c = 0; MODE == DOWN_BWD && c < extra_steps(p, t.n); ++c, ++it) {
            const u32 stage = it % STAGES, a = smem + stage * STAGE_BYTES, bar = full + 8 * stage;
            barrier_wait(empty + 8 * stage, ((it / STAGES) & 1) ^ 1);
            if (thread == 0) {
                barrier_expect(bar, 4 * KEPT_BYTES);
#pragma unroll
                for (int q = 0; q < 4; ++q)  // g, u of the first 64 rows, then of the second
                    bulk_load(a + q * KEPT_BYTES, kept_block(p, t.row + q / 2 * 64, f_tiles, 2 * t.n + c / 2) + ((q % 2) * 8 + c % 2 * 4) * 128, KEPT_BYTES, bar);
            }
            copy_arrive(bar);
        }
    }
    // Copies still in flight must land before the block's shared memory is gone.
    if (S::GATHER) asm volatile("cp.async.wait_all;" ::: "memory");
}

DEVICE void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// A warp's output leaves in boxes of 16 rows x 64 columns: stmatrix into one of two staging buffers, then a TMA store.
struct Writer {
    u32 staging;
    u32 count;
    DEVICE u32 buffer(int i) const { return staging + i * BOX_BYTES; }
    // Column groups j and j + 1 (8 columns each): words of rows 0-7 and 8-15 of j, then of j + 1.
    DEVICE void put(u32 buffer, int j, u32 w0, u32 w1, u32 w2, u32 w3) const {
        const int lane = lane_id(), row = lane & 15;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(buffer + row * 128 + (((j + (lane >> 4)) ^ (row & 7)) << 4)),
                     "r"(w0), "r"(w1), "r"(w2), "r"(w3)
                     : "memory");
    }
    // words(j, half): the packed pair of column group j, rows 0-7 (half 0) or 8-15 (half 1).
    template <class Words, class Store>
    DEVICE void box(Words words, Store store) {
        const u32 base = buffer(count++ & 1);
        if (lane_id() == 0) store_wait_read<1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j += 2) put(base, j, words(j, 0), words(j, 1), words(j + 1, 0), words(j + 1, 1));
        fence_async();
        __syncwarp();
        if (lane_id() == 0) {
            store(base);
            store_commit();
        }
    }
    // A group's 64 rows x 64 columns, transposed: its warps fill one box together.
    template <class Words, class Store>
    DEVICE void transposed_box(int group, Words words, Store store) {
        const int lane = lane_id(), warp = threadIdx.x / 32 % 4;
        const bool first = threadIdx.x % 128 == 0;
        const u32 base = staging - warp * 2 * BOX_BYTES + (count++ & 1) * 4 * BOX_BYTES;
        if (first) store_wait_read<1>();
        group_sync(group);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const int line = 8 * (j + lane / 16) + lane % 8, unit = 2 * warp + lane / 8 % 2;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(base + line * 128 + ((unit ^ (line & 7)) << 4)),
                         "r"(words(j, 0)), "r"(words(j, 1)), "r"(words(j + 1, 0)), "r"(words(j + 1, 1))
                         : "memory");
        }
        fence_async();
        group_sync(group);
        if (first) {
            store(base);
            store_commit();
        }
    }
};

// The finished products of a tile, rounded to bf16, on their way out while the next tile is multiplied. Register
// layout of wgmma: word 2 j + h holds columns 8 j + 2 (lane % 4) + {0, 1} of row lane / 4 + 8 h of the warp's 16.
template <int MODE>
struct Held {
    u32 words[64];
    float scores[2];
    int row, n, chunk, expert, m;  // row: the group's first, or -1 if none of its rows is valid

    DEVICE void take(const float (&acc)[128]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) words[i] = pack(acc[2 * i], acc[2 * i + 1]);
    }

    // Step c (0 to 3) of the way out.
    template <int C>
    DEVICE void step(const Params& p, Writer& writer, int group, int f_tiles, u32 kept) {
        const int thread = threadIdx.x % 128, warp = thread / 32, row = this->row + warp * 16;
        if (MODE == GATE_UP) {
            if (C < 2) {
                const int column = n * BM + C * BOX;
                if (column < p.F)
                    writer.box(
                        [&](int j, int h) {
                            const u32 g = words[2 * (8 * (C & 1) + j) + h], u = words[32 + 2 * (8 * (C & 1) + j) + h];
                            const float s = scores[h], g0 = low(g), g1 = high(g);
                            return pack(g0 * sigmoid(g0) * low(u) * s, g1 * sigmoid(g1) * high(u) * s);
                        },
                        [&](u32 from) { tma_store(p.c0, from, column, row); });
            } else if (p.keep) {
                uint4* out = kept_block(p, this->row, f_tiles, n) + thread;
#pragma unroll
                for (int v = 8 * (C & 1); v < 8 * (C & 1) + 8; ++v) out[v * 128] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
            }
        } else if (MODE == DOWN_BWD) {
            const int column = n * BN + C * BOX;
            float sums[2] = {0.f, 0.f};
            if (lane_id() == 0) store_wait_read<0>();
            __syncwarp();
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                u32 gs[4], us[4], dg[4], du[4];
                load_shared(gs, kept + v * 2048);
                load_shared(us, kept + KEPT_BYTES + v * 2048);
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const u32 dh = words[16 * C + 4 * v + w];
                    float out[2][2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float g = e ? high(gs[w]) : low(gs[w]), u = e ? high(us[w]) : low(us[w]), d = e ? high(dh) : low(dh);
                        const float sig = sigmoid(g), silu = g * sig, ds = d * scores[w & 1];
                        sums[w & 1] = fmaf(silu * u, d, sums[w & 1]);
                        out[0][e] = ds * u * fmaf(silu, 1.f - sig, sig);
                        out[1][e] = ds * silu;
                    }
                    dg[w] = pack(out[0][0], out[0][1]);
                    du[w] = pack(out[1][0], out[1][1]);
                }
                writer.put(writer.buffer(0), 2 * v, dg[0], dg[1], dg[2], dg[3]);
                writer.put(writer.buffer(1), 2 * v, du[0], du[1], du[2], du[3]);
            }
            fence_async();
            __syncwarp();
            if (lane_id() == 0) {
                tma_store(p.c0, writer.buffer(0), column, row);
                tma_store(p.c1, writer.buffer(1), column, row);
                store_commit();
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sums[h] += __shfl_xor_sync(~0u, sums[h], 1);
                sums[h] += __shfl_xor_sync(~0u, sums[h], 2);
                if (lane_id() % 4 == 0) p.dscores[(u64)(4 * n + C) * p.max_rows + row + lane_id() / 4 + 8 * h] = sums[h];
            }
        } else {
            auto of_step = [&](int j, int h) { return words[16 * C + 2 * j + h]; };
            const int n_tiles = (p.F + BN - 1) / BN;
            const bool up = MODE == DW13 && n >= n_tiles;
            const int column = (up ? n - n_tiles : n) * BN + C * BOX, first = m * BM + group * 64;
            if (column >= (Shape<MODE>::WEIGHT ? p.F : p.D)) return;
            if (MODE == DW13)
                writer.transposed_box(group, of_step, [&](u32 from) { tma_store(up ? p.c1 : p.c0, from, first, column, expert); });
            else
                writer.box(of_step, [&](u32 from) {
                    if (MODE == DW2) tma_store(p.c0, from, column, first + warp * 16, expert);
                    else tma_store(p.c0, from, column, row);
                });
        }
    }
};

template <int MODE>
DEVICE void consume(const Params& p, u32 smem, const Schedule<MODE>& schedule) {
    using S = Shape<MODE>;
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = lane_id();
    const u32 full = smem + BARRIERS, empty = full + 8 * STAGES;
    const u32 peer_empty = of_block(empty, schedule.half ^ 1);  // the other block writes into this one's stages too
    auto release = [&](u32 stage) {
        barrier_arrive(empty + 8 * stage);
        barrier_arrive_remote(peer_empty + 8 * stage);
    };
    const int f_tiles = (p.F + BM - 1) / BM;
    Writer writer{smem + STAGING + (group * 4 + warp) * 2 * BOX_BYTES, 0};
    u32 it = 0;
    float acc[128];
    Held<MODE> held;
    held.row = -1;
    held.n = -1;
    held.chunk = -1;

    auto step_out = [&](int c) {
        if (held.row < 0) return;
        if (c == 0) held.template step<0>(p, writer, group, f_tiles, 0);
        else if (c == 1) held.template step<1>(p, writer, group, f_tiles, 0);
        else if (c == 2) held.template step<2>(p, writer, group, f_tiles, 0);
        else if (c == 3) held.template step<3>(p, writer, group, f_tiles, 0);
    };
    // Once the held tile's stores are complete: tell the warps that sum its rows.
    auto report = [&] {
        if (S::DESCENDING && lane == 0 && held.chunk >= 0) {
            store_wait_all();
            asm volatile("fence.proxy.async;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.done + held.chunk) : "memory");
        }
        held.chunk = -1;
    };
    Tile next{};
    if (schedule.first < schedule.total) next = schedule[schedule.first];
    for (int i = schedule.first; i < schedule.total; i += schedule.stride) {
        const Tile t = next;
        if (i + schedule.stride < schedule.total) next = schedule[i + schedule.stride];
        const bool active = S::WEIGHT || t.valid > group * 64;
        float scores[2];
        if (S::SWIGLU) {
            const float* at = p.scores + t.row + group * 64 + warp * 16 + lane / 4;
            scores[0] = at[0], scores[1] = at[8];
        }
        if (active) {
            u32 last = 0;
            if (S::WEIGHT && t.steps == 0) {
#pragma unroll
                for (int j = 0; j < 128; ++j) acc[j] = 0.f;
            }
            for (int k = 0; k < t.steps; ++k) {
                const u32 stage = it % STAGES, at = smem + stage * STAGE_BYTES + group * 8192;
                barrier_wait(full + 8 * stage, (it / STAGES) & 1);
                const u64 a = descriptor(at, S::WEIGHT), b = descriptor(smem + stage * STAGE_BYTES + A_BYTES, S::B_MN);
                if (S::GATHER) fence_async();
                wgmma_arrive();
#pragma unroll
                for (int j = 0; j < BK / 16; ++j)
                    wgmma_m64n256k16<S::WEIGHT, S::B_MN>(acc, a + j * (S::WEIGHT ? 128 : 2), b + j * (S::B_MN ? 128 : 2), k > 0 || j > 0);
                wgmma_commit();
                ++it;
                if (S::DEFERS) step_out(k);
                // By then the stores are through, and there are products to hide the release behind.
                if (S::DESCENDING && k == 7) report();
                if (k > 0) {
                    wgmma_wait<1>();
                    if (thread == 1) release(last);
                }
                last = stage;
            }
            wgmma_wait<0>();
            if (t.steps > 0 && thread == 1) release(last);
        } else {
            for (int k = 0; k < t.steps; ++k) {
                const u32 stage = it % STAGES;
                barrier_wait(full + 8 * stage, (it / STAGES) & 1);
                group_sync(group);  // or a barrier's phase could wrap under a late warp
                if (thread == 1) release(stage);
                ++it;
                if (S::DEFERS) step_out(k);
            }
        }
        for (int c = t.steps; S::DEFERS && c < 4; ++c) step_out(c);
        report();
        if (S::DEFERS) {
            if (active) held.take(acc);
            held.row = active ? t.row + group * 64 : -1;
            held.n = t.n;
            held.chunk = t.chunk;
            held.expert = t.expert;
            held.m = t.m;
            continue;
        }
        Held<MODE> now;
        now.row = t.row + group * 64;
        now.n = t.n;
        now.scores[0] = scores[0], now.scores[1] = scores[1];
        if (active) now.take(acc);
        // DOWN_BWD's steps each take a stage with the kept g and u of 64 columns.
        const int steps_out = MODE == DOWN_BWD ? extra_steps(p, t.n) : 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (c >= steps_out) break;
            const u32 stage = it % STAGES, kept = smem + stage * STAGE_BYTES + group * 2 * KEPT_BYTES + thread * 16;
            if (MODE == DOWN_BWD) barrier_wait(full + 8 * stage, (it / STAGES) & 1);
            if (active) {
                if (c == 0) now.template step<0>(p, writer, group, f_tiles, kept);
                if (c == 1) now.template step<1>(p, writer, group, f_tiles, kept);
                if (c == 2) now.template step<2>(p, writer, group, f_tiles, kept);
                if (c == 3) now.template step<3>(p, writer, group, f_tiles, kept);
            }
            if (MODE == DOWN_BWD) {
                group_sync(group);
                if (thread == 1) release(stage);
                ++it;
            }
        }
    }
    for (int c = 0; S::DEFERS && c < 4; ++c) step_out(c);
    report();
    if (lane < 2) store_wait_all();
}

// ---- The combine: warps that do not multiply sum a token's rows of this rank.

// A lane's part of 512 columns of a row: two 16-byte vectors, 256 columns apart.
DEVICE void get_row(uint4 (&v)[2], const u8* at, bool first, bool second) {
    v[0] = first ? __ldcg((const uint4*)at) : make_uint4(0, 0, 0, 0);
    v[1] = second ? __ldcg((const uint4*)(at + 512)) : make_uint4(0, 0, 0, 0);
}
DEVICE void add_row(float (&sum)[16], const uint4 (&v)[2]) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const u32 w[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[8 * q + 2 * i] += low(w[i]);
            sum[8 * q + 2 * i + 1] += high(w[i]);
        }
    }
}
DEVICE void put_row(const float (&sum)[16], u8* at, bool second) {
#pragma unroll
    for (int q = 0; q < 2; ++q)
        if (q == 0 || second)
            *(uint4*)(at + 512 * q) = make_uint4(pack(sum[8 * q], sum[8 * q + 1]), pack(sum[8 * q + 2], sum[8 * q + 3]), pack(sum[8 * q + 4], sum[8 * q + 5]),
                                                 pack(sum[8 * q + 6], sum[8 * q + 7]));
}

// The router-score gradient of a row: its partial sums, in order.
DEVICE float dscore(const Params& p, int row) {
    float sum = 0.f;
    for (int n = 0; n < p.F / BOX; ++n) sum += p.dscores[(u64)n * p.max_rows + row];
    return sum;
}

// `out` = sum over one token's rows, in slot order, in float32, plus what `more` adds; row: that of this lane's slot, or -1.
template <class More>
DEVICE void sum_token(const Params& p, int row, u8* out, More more) {
    const u32 slots = __ballot_sync(~0u, row >= 0);
    for (int column = lane_id() * 8; column < p.D + lane_id() * 8; column += 512) {
        // D is a multiple of 64, so the last 512 columns may be partly outside.
        const bool first = column < p.D, second = column + 256 < p.D;
        float sum[16] = {};
        for (u32 left = slots; left;) {
            uint4 v[4][2];  // four rows in flight
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int r = __shfl_sync(~0u, row, left ? __ffs(left) - 1 : 0);
                get_row(v[q], p.partial_rows + ((u64)r * p.D + column) * 2, left && first, left && second);
                left &= left - 1;
            }
#pragma unroll
            for (int q = 0; q < 4; ++q) add_row(sum, v[q]);
        }
        more(sum, column, first, second);
        if (first) put_row(sum, out + column * 2, second);
    }
}

DEVICE int take_ticket(u32* counter) {
    int ticket = lane_id() == 0 ? (int)atomicAdd(counter, 1u) : 0;
    return __shfl_sync(~0u, ticket, 0);
}

// The row of this lane's slot of a token, or -1.
DEVICE int row_of(const Params& p, int source, int token) {
    const bool there = token < p.tokens[source] && lane_id() < p.top_k;
    return there ? p.row_of[((u64)source * p.t_max + token) * p.top_k + lane_id()] : -1;
}

// Tokens that hand out tickets: a rank without tokens has one ticket, so that its sums too are awaited and returned.
DEVICE int at_least_one(int tokens) { return max(tokens, 1); }

// Asked by whole warps: lanes that saw different answers would part.
DEVICE bool stopped(volatile u32* stop) { return stop && __shfl_sync(~0u, *stop, 0); }

// Peers' tokens, farthest first: once a chunk's tiles are done, sum each token's rows and store the sum to the peer.
// stop: tells that the block's tiles are done; then it leaves even if others' are not, or it might hold the
// multiprocessor that their block waits for. Null where the kernel that made the rows has ended.
DEVICE void combine_peers(const Params& p, volatile u32* stop) {
    const int lane = lane_id(), tiles_n = (p.D + BN - 1) / BN;
    int done = p.ep_size;  // the nearest chunk known to be done
    for (int c = p.ep_size - 1; c > 0;) {
        if (stopped(stop)) return;
        // Rows of this source may lie in tiles of farther chunks too: those were waited for before.
        if (stop && c < done) {
            if (__any_sync(~0u, load_relaxed(p.done + c) < (u32)(p.tiles_of[c] * tiles_n * 8))) {
                __nanosleep(4000);
                continue;
            }
            __threadfence_system();
            done = c;
        }
        const int source = (p.rank + c) % p.ep_size, tokens = p.tokens[source];
        const int first = take_ticket(p.tickets + c) * TICKET;
        if (first >= at_least_one(tokens)) {
            --c;
            continue;
        }
        u8* peer = (u8*)p.peers[source];
        int rows[TICKET];
#pragma unroll
        for (int q = 0; q < TICKET; ++q) rows[q] = row_of(p, source, first + q);
#pragma unroll
        for (int q = 0; q < TICKET; ++q) {
            if (!__any_sync(~0u, rows[q] >= 0)) continue;
            sum_token(p, rows[q], peer + p.sums_offset + ((u64)p.rank * p.t_max + first + q) * p.D * 2, [](float(&)[16], int, bool, bool) {});
            if (p.backward && rows[q] >= 0) ((float*)(peer + p.dscores_offset))[(first + q) * p.top_k + lane] = dscore(p, rows[q]);
        }
        __threadfence_system();
        __syncwarp();
        const int sub = first / SUB, in_sub = min(SUB, tokens - sub * SUB), here = min(TICKET, tokens - first);
        if (lane == 0 && (int)atomicAdd(p.summed + c * p.subs + sub, (u32)here) + here == in_sub) {
            __threadfence_system();
            // On the peer this rank is at distance ep_size - c.
            u32* flag = (u32*)(peer + p.returned_offset) + (p.ep_size - c) * p.subs + sub;
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(*p.epoch) : "memory");
        }
    }
}

// This rank's own tokens: the sum of their rows here, then what the peers sent, by ring distance.
DEVICE void combine_own(const Params& p) {
    const int lane = lane_id(), tokens = p.tokens[p.rank];
    const u8* mine = (const u8*)p.peers[p.rank];
    int returned = -1;  // the sub whose sums are known to be here
    for (;;) {
        const int t = take_ticket(p.tickets);
        if (t >= at_least_one(tokens)) return;
        if (t / SUB != returned) {
            returned = t / SUB;
            for (int c = 1; c < p.ep_size; ++c) wait_flag(p.returned + c * p.subs + returned, *p.epoch, COMBINE, c, p.error, p.timeout_ns);
        }
        if (t >= tokens) return;
        const int row = row_of(p, p.rank, t);
        const int id = lane < p.top_k ? (int)p.ids[(u64)t * p.top_k + lane] : -1;
        const int owner = id < 0 || id >= p.experts * p.ep_size ? p.rank : id / p.experts;
        const u32 owners = __reduce_or_sync(~0u, 1u << owner);
        sum_token(p, row, p.out + (u64)t * p.D * 2, [&](float(&sum)[16], int column, bool first, bool second) {
            for (int c = 1; c < p.ep_size; ++c) {
                const int source = (p.rank + c) % p.ep_size;
                if (!(owners >> source & 1)) continue;
                uint4 v[2];
                get_row(v, mine + p.sums_offset + (((u64)source * p.t_max + t) * p.D + column) * 2, first, second);
                add_row(sum, v);
            }
        });
        if (p.backward && lane < p.top_k)
            p.dscores_out[(u64)t * p.top_k + lane] =
                row >= 0 ? dscore(p, row) : id < 0 ? 0.f : ((const float*)(mine + p.dscores_offset))[t * p.top_k + lane];
    }
}

template <int MODE>
DEVICE void run(const Params& p) {
    using S = Shape<MODE>;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 smem = smem_address(shared), full = smem + BARRIERS;
    if (threadIdx.x == 0) {
        *(volatile u32*)(shared + STOP) = 0;
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, S::GATHER ? 129 : 1);
            barrier_init(full + 8 * (STAGES + s), 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    cluster_sync();
    const Schedule<MODE> schedule(p);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        if (S::GATHER || threadIdx.x == 0) produce<MODE>(p, smem, schedule);
        else if (threadIdx.x >= 32) combine_peers(p, (volatile u32*)(shared + STOP));
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        consume<MODE>(p, smem, schedule);
        if (threadIdx.x == 128) *(volatile u32*)(shared + STOP) = 1;
    }
    cluster_sync();  // the other block may still write here
}

#define KERNEL(name, mode) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) name(const __grid_constant__ Params p) { run<mode>(p); }

KERNEL(gate_up, GATE_UP)
KERNEL(down, DOWN)
KERNEL(down_backward, DOWN_BWD)
KERNEL(gate_up_backward, GATE_UP_BWD)
KERNEL(weight_grad_gate_up, DW13)
KERNEL(weight_grad_down, DW2)

extern "C" __global__ void __launch_bounds__(384, 2) combine_rest(const __grid_constant__ Params p) { combine_peers(p, nullptr); }
extern "C" __global__ void __launch_bounds__(384, 2) combine(const __grid_constant__ Params p) {
    combine_peers(p, nullptr);
    combine_own(p);
}
