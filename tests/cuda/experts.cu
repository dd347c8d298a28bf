/* The expert products against a plain double-precision one on the same device, and their speed.
 *
 * Usage: experts check | short | check8 [SEED] | tiny | tiny8 | bench | bench20 [TOKENS ...] | bench8 | bench820.
 * Stands alone, without a backend. tiny and tiny8 are small enough for compute-sanitizer and still reach every tile
 * width of their kernels. Of MXFP4 a check prints a hash of all outputs, by which two versions are compared.
 * Weights of the checks are random MXFP4 at the real width with few experts; outputs are poisoned before every
 * run; routings are random, skewed, and with experts that get nothing. Benches rotate over layers, so that
 * no weight is still in the second-level cache, and time graph replays. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/moe.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t err_ = (call);                                                                 \
        if (err_ != cudaSuccess) {                                                                 \
            printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err_));              \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t seed_state = 1;
static int n_failed;

static uint32_t random_u32()
{
    seed_state = seed_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed_state >> 33);
}

static float random_normal()
{
    float u = (random_u32() + 1.0f) / 2147483649.0f, v = random_u32() / 2147483648.0f;
    return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

template <typename T> struct buffer {
    T *p = nullptr;
    size_t n = 0;
    explicit buffer(size_t count) : n(count)
    {
        CHECK(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)));
    }
    explicit buffer(const std::vector<T> &v) : buffer(v.size())
    {
        CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    buffer(const buffer &) = delete;
    ~buffer()
    {
        cudaFree(p);
    }
    std::vector<T> get() const
    {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void poison()
    {
        CHECK(cudaMemset(p, 0xff, n * sizeof(T)));
    }
};

/* One matrix family in the checkpoint's format and packed. */
struct weights {
    uint32_t n_experts, rows, cols;
    std::vector<uint8_t> blocks, scales;
    std::vector<uint16_t> bias;
    std::vector<uint8_t> mx, fp8;
    std::vector<float> fp8_scales;

    weights(uint32_t e, uint32_t r, uint32_t c, bool paired) : n_experts(e), rows(r), cols(c)
    {
        blocks.resize((size_t)e * r * c / 2);
        scales.resize((size_t)e * r * c / 32);
        bias.resize((size_t)e * r);
        for (auto &b : blocks) {
            b = (uint8_t)random_u32();
        }
        for (auto &s : scales) {
            /* FP8 blocks of 14 octaves: as far as they are exact. */
            s = (uint8_t)(random_u32() % 16 == 0 ? 108 + random_u32() % 8 : 116 + random_u32() % 7);
        }
        for (auto &b : bias) {
            b = dmk_f32_to_bf16(random_normal());
        }
        size_t one = dmk_mxfp4_pack_bytes(r, c), one8 = dmk_fp8_pack_bytes(r, c), n_bad = 0;
        size_t n_sc = (size_t)((r + 127) / 128) * ((c + 127) / 128);
        mx.resize(e * one);
        fp8.resize(e * one8);
        fp8_scales.resize(e * n_sc);
        for (uint32_t i = 0; i < e; i++) {
            const uint8_t *b = blocks.data() + (size_t)i * r * c / 2;
            const uint8_t *s = scales.data() + (size_t)i * r * c / 32;
            n_bad += dmk_mxfp4_pack(b, s, r, c, paired, mx.data() + i * one);
            n_bad += dmk_fp8_pack(b, s, r, c, paired, fp8.data() + i * one8, fp8_scales.data() + i * n_sc);
        }
        if (n_bad != 0) {
            printf("FAIL pack: %zu inexact\n", n_bad);
            n_failed++;
        }
    }
};

struct routing {
    uint32_t n_rows, k, n_experts, n_slots;
    std::vector<uint32_t> begin, slot_row, row_slots;

    /* ids[n_rows][k], local ones are below n_experts */
    routing(uint32_t rows, uint32_t k_, uint32_t e, const std::vector<uint32_t> &ids)
        : n_rows(rows), k(k_), n_experts(e)
    {
        begin.assign(e + 1, 0);
        for (uint32_t id : ids) {
            if (id < e) {
                begin[id + 1]++;
            }
        }
        for (uint32_t i = 0; i < e; i++) {
            begin[i + 1] += begin[i];
        }
        n_slots = begin[e];
        slot_row.assign((size_t)rows * k, 0xffffffffu);
        row_slots.assign((size_t)rows * k, 0xffffffffu);
        std::vector<uint32_t> at(begin.begin(), begin.end());
        for (uint32_t t = 0; t < rows; t++) {
            uint32_t n = 0;
            for (uint32_t i = 0; i < k; i++) {
                uint32_t id = ids[(size_t)t * k + i];
                if (id < e) {
                    slot_row[at[id]] = t;
                    row_slots[(size_t)t * k + n++] = at[id]++;
                }
            }
            std::sort(row_slots.begin() + (size_t)t * k, row_slots.begin() + (size_t)t * k + n);
        }
    }
};

enum spread { UNIFORM, SKEWED, SOME_EMPTY, ONE_EXPERT, SOME_REMOTE };

static std::vector<uint32_t> choose(uint32_t rows, uint32_t k, uint32_t e, enum spread how)
{
    std::vector<uint32_t> ids;
    for (uint32_t t = 0; t < rows; t++) {
        std::vector<uint32_t> mine;
        while (mine.size() < k) {
            uint32_t id = random_u32() % e;
            if (how == SKEWED && random_u32() % 4 != 0) {
                id = random_u32() % std::max(1u, e / 8);
            } else if (how == SOME_EMPTY) {
                id = id / 2 * 2;
            } else if (how == ONE_EXPERT) {
                id = mine.empty() ? e / 2 : e + (uint32_t)mine.size();
            } else if (how == SOME_REMOTE) {
                id = random_u32() % (2 * e);
            }
            bool can_repeat = (how == SKEWED && e / 8 < k) || (how == SOME_EMPTY && e / 2 < k);
            if (can_repeat || std::find(mine.begin(), mine.end(), id) == mine.end()) {
                mine.push_back(id);
            }
        }
        ids.insert(ids.end(), mine.begin(), mine.end());
    }
    return ids;
}

/* --- plain products in double --- */

__device__ double value(const uint8_t *blocks, const uint8_t *scales, size_t at)
{
    const float mag[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    uint8_t byte = blocks[at / 2], code = at % 2 ? byte >> 4 : byte & 15;
    return ldexp((double)(code & 8 ? -mag[code & 7] : mag[code & 7]), scales[at / 32] - 127);
}

/* out[slot][row] = w in + bias, `in` in float: [rows of x or slots][cols] */
__global__ void plain(const uint8_t *blocks, const uint8_t *scales, const uint16_t *bias, uint32_t rows,
                      uint32_t cols, const float *in, const uint32_t *begin, const uint32_t *slot_row,
                      uint32_t n_experts, double *out)
{
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x, slot = blockIdx.y, e = 0;
    while (e < n_experts && begin[e + 1] <= slot) {
        e++;
    }
    if (row >= rows || e == n_experts) {
        return;
    }
    const float *x = in + (size_t)(slot_row ? slot_row[slot] : slot) * cols;
    double sum = 0.0;
    size_t at = ((size_t)e * rows + row) * cols;
    for (uint32_t k = 0; k < cols; k++) {
        sum += value(blocks, scales, at + k) * x[k];
    }
    out[(size_t)slot * rows + row] =
        sum + __uint_as_float((uint32_t)bias[(size_t)e * rows + row] << 16);
}

/* ||a - b|| / ||b||; NaN when a value is missing */
static double distance(const std::vector<double> &a, const std::vector<double> &b)
{
    double up = 0, down = 0;
    for (size_t i = 0; i < a.size(); i++) {
        up += (a[i] - b[i]) * (a[i] - b[i]);
        down += b[i] * b[i];
    }
    return sqrt(up / (down > 0 ? down : 1));
}

static void expect(bool ok, const char *what, const char *how, double got)
{
    if (!ok) {
        printf("FAIL %s: %s %g\n", what, how, got);
        n_failed++;
    }
}

static double swiglu(double gate, double up)
{
    gate = gate > 7 ? 7 : gate;
    up = up > 7 ? 7 : up < -7 ? -7 : up;
    return gate / (1 + exp(-1.702 * gate)) * (up + 1);
}

struct device_weights {
    buffer<uint8_t> blocks, scales, mx, fp8;
    buffer<float> fp8_scales;
    buffer<uint16_t> bias;
    const struct weights &w;
    explicit device_weights(const struct weights &from)
        : blocks(from.blocks), scales(from.scales), mx(from.mx), fp8(from.fp8),
          fp8_scales(from.fp8_scales), bias(from.bias), w(from)
    {
    }
    struct dmk_moe_matrix matrix(bool as_fp8) const
    {
        return {as_fp8 ? fp8.p : mx.p, fp8_scales.p, bias.p, w.rows, w.cols};
    }
    std::vector<double> apply(const struct routing &r, const std::vector<float> &in, bool by_row) const
    {
        buffer<float> x(in);
        buffer<uint32_t> begin(r.begin), slot_row(r.slot_row);
        buffer<double> out((size_t)r.n_slots * w.rows);
        if (r.n_slots > 0) {
            dim3 grid((w.rows + 127) / 128, r.n_slots);
            plain<<<grid, 128>>>(blocks.p, scales.p, bias.p, w.rows, w.cols, x.p, begin.p,
                                 by_row ? slot_row.p : nullptr, r.n_experts, out.p);
            CHECK(cudaDeviceSynchronize());
        }
        return out.get();
    }
};

static std::vector<float> floats(const std::vector<uint16_t> &v, size_t n)
{
    std::vector<float> out(n);
    for (size_t i = 0; i < n; i++) {
        out[i] = dmk_bf16_to_f32(v[i]);
    }
    return out;
}

struct mx_run {
    std::vector<uint16_t> z;
    std::vector<float> y;
};

/* mode 0: fused, 1: two launches */
static struct mx_run run_mx(const struct device_weights &gu, const struct device_weights &dn,
                            const struct routing &r, const std::vector<uint16_t> &x, uint32_t tile,
                            int mode)
{
    uint32_t hidden = dn.w.rows, inter = dn.w.cols;
    buffer<uint16_t> dx(x), z((size_t)(r.n_slots + 1) * inter);
    buffer<float> y((size_t)(r.n_slots + 1) * hidden);
    buffer<uint32_t> begin(r.begin), slot_row(r.slot_row), scratch(r.n_experts + 1);
    CHECK(cudaMemset(scratch.p, 0, scratch.n * 4));
    z.poison();
    y.poison();
    struct dmk_moe_layer_args a = {};
    a.gate_up = gu.matrix(false);
    a.down = dn.matrix(false);
    a.x = dx.p;
    a.expert_begin = begin.p;
    a.slot_row = slot_row.p;
    a.z = z.p;
    a.y = y.p;
    a.scratch = scratch.p;
    a.n_rows = r.n_rows;
    a.k = r.k;
    a.n_experts = r.n_experts;
    a.alpha = 1.702f;
    a.limit = 7.0f;
    if (mode == 0) {
        CHECK(dmk_moe_mxfp4(&a, tile, 0));
    } else {
        CHECK(dmk_moe_mxfp4_gate_up(&a, tile, 0));
        CHECK(dmk_moe_mxfp4_down(&a, tile, 0));
    }
    CHECK(cudaDeviceSynchronize());
    for (uint32_t v : scratch.get()) {
        expect(v == 0, "mxfp4", "counter left", v);
    }
    struct mx_run out = {z.get(), y.get()};
    for (uint32_t i = 0; i < inter; i++) {
        expect(out.z[(size_t)r.n_slots * inter + i] == 0xffff, "mxfp4", "z past the end", i);
    }
    return out;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3ull;
    }
    return hash;
}

static void check_mx(const struct device_weights &gu, const struct device_weights &dn, uint32_t rows,
                     enum spread how)
{
    char what[80];
    uint32_t hidden = dn.w.rows, inter = dn.w.cols;
    snprintf(what, sizeof(what), "mxfp4 %u rows, spread %d, %u x %u", rows, how, hidden, inter);
    struct routing r(rows, 4, gu.w.n_experts, choose(rows, 4, gu.w.n_experts, how));
    std::vector<uint16_t> x((size_t)rows * hidden);
    for (auto &v : x) {
        v = dmk_f32_to_bf16(random_normal());
    }
    struct mx_run first = run_mx(gu, dn, r, x, 8, 1);
    std::vector<double> h = gu.apply(r, floats(x, x.size()), true);
    size_t n_z = (size_t)r.n_slots * inter, n_y = (size_t)r.n_slots * hidden;
    std::vector<double> want(n_z), got(n_z);
    for (size_t s = 0; s < r.n_slots; s++) {
        for (uint32_t j = 0; j < inter; j++) {
            want[s * inter + j] = swiglu(h[s * 2 * inter + 2 * j], h[s * 2 * inter + 2 * j + 1]);
            got[s * inter + j] = dmk_bf16_to_f32(first.z[s * inter + j]);
        }
    }
    double dz = distance(got, want);
    std::vector<double> want_y = dn.apply(r, floats(first.z, n_z), false);
    double dy = distance(std::vector<double>(first.y.begin(), first.y.begin() + n_y), want_y);
    const uint64_t hash =
        hash_bytes(hash_bytes(0xcbf29ce484222325ull, first.z.data(), n_z * 2), first.y.data(), n_y * 4);
    printf("%s: z %.2e y %.2e hash %016llx\n", what, dz, dy, (unsigned long long)hash);
    expect(dz < 3e-3, what, "distance of z", dz);
    expect(dy < 2e-6, what, "distance of y", dy);
    for (int mode = 0; mode < 2; mode++) {
        for (uint32_t tile = 8; tile <= 24; tile += 8) {
            for (int again = 0; again < 3; again++) {
                struct mx_run other = run_mx(gu, dn, r, x, tile, mode);
                snprintf(what, sizeof(what), "mxfp4 mode %d, tile %u, %u rows", mode, tile, rows);
                expect(memcmp(other.z.data(), first.z.data(), n_z * 2) == 0, what, "z differs", 0);
                expect(memcmp(other.y.data(), first.y.data(), n_y * 4) == 0, what, "y differs", 0);
            }
        }
    }
    /* A row alone. */
    if (rows > 1 && r.n_slots > 0) {
        uint32_t row = random_u32() % rows;
        std::vector<uint32_t> ids;
        std::vector<uint32_t> mine;
        for (uint32_t s = 0; s < r.n_slots; s++) {
            if (r.slot_row[s] == row) {
                mine.push_back(s);
                uint32_t e = 0;
                while (r.begin[e + 1] <= s) {
                    e++;
                }
                ids.push_back(e);
            }
        }
        ids.resize(4, gu.w.n_experts);
        struct routing alone(1, 4, gu.w.n_experts, ids);
        std::vector<uint16_t> x1(x.begin() + (size_t)row * hidden, x.begin() + (size_t)(row + 1) * hidden);
        struct mx_run one = run_mx(gu, dn, alone, x1, 8, 0);
        for (size_t i = 0; i < mine.size(); i++) {
            expect(memcmp(&one.y[i * hidden], &first.y[(size_t)mine[i] * hidden], hidden * 4) == 0, what,
                   "row alone differs", row);
        }
    }
}

#include "tests/cuda/experts_fp8.cuh"

/* What the device packs at load is what the host packs. */
static void check_pack(const struct weights &w, bool paired)
{
    struct dmk_cuda_stream stream = {};
    buffer<uint8_t> blocks(w.blocks), scales(w.scales);
    for (int fp8 = 0; fp8 < 2; fp8++) {
        struct dmk_moe_pack_args a = {};
        a.w.format = fp8 ? DMK_WEIGHT_FP8 : DMK_WEIGHT_MXFP4;
        a.w.blocks = blocks.p;
        a.w.scales = scales.p;
        a.w.rows = w.rows;
        a.w.cols = w.cols;
        a.n_experts = w.n_experts;
        a.gate_up = paired;
        struct dmk_moe_packed bytes = dmk_cuda_moe_packed(&a.w, w.n_experts, paired);
        const std::vector<uint8_t> &want = fp8 ? w.fp8 : w.mx;
        expect(bytes.blocks == want.size(), "pack", "size", (double)bytes.blocks);
        buffer<uint8_t> out(bytes.blocks), out_scales(bytes.scales);
        out.poison();
        a.blocks = out.p;
        a.scales = out_scales.p;
        dmk_cuda_moe_pack(&a, &stream.base);
        CHECK((cudaError_t)stream.error);
        CHECK(cudaDeviceSynchronize());
        expect(out.get() == want, "pack", "bytes differ, fp8", fp8);
        if (fp8) {
            std::vector<uint8_t> got = out_scales.get();
            expect(got.size() == w.fp8_scales.size() * 4 &&
                       memcmp(got.data(), w.fp8_scales.data(), got.size()) == 0,
                   "pack", "scales differ", 0);
        }
    }
    printf("pack %u x %u: %s\n", w.rows, w.cols, n_failed ? "see above" : "equal");
}

/* --- speed --- */

__global__ void fill(uint32_t *p, size_t n, uint32_t seed, uint32_t mask, uint32_t base)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
        x ^= x >> 29;
        x *= 0xbf58476d1ce4e5b9ull;
        x ^= x >> 32;
        p[i] = ((uint32_t)x & mask) + base;
    }
}

/* The scales of packed stages: fields of 2^-7 or 2^-6. */
__global__ void fill_scales(uint8_t *p, size_t n_stages)
{
    for (size_t i = blockIdx.x; i < n_stages; i += gridDim.x) {
        for (uint32_t j = threadIdx.x; j < DMK_MXPACK_SPLITS * 384; j += blockDim.x) {
            p[i * DMK_MXPACK_STAGE_BYTES + DMK_MXPACK_CODE_BYTES + j] = 120 + 126 + j % 2;
        }
    }
}

/* The shifts of pieces for FP8: -1 to 6. */
__global__ void fill_shifts(uint32_t *p, size_t n_pieces)
{
    for (size_t i = blockIdx.x; i < n_pieces; i += gridDim.x) {
        uint32_t *word = p + i * (DMK_FP8PACK_PIECE_BYTES / 4) + DMK_FP8PACK_CODE_BYTES / 4 + threadIdx.x;
        *word = (*word & 0x38383838u) + 0x68686868u;
    }
}

__global__ void fill_bf16(uint16_t *p, size_t n, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
        x ^= x >> 29;
        x *= 0xbf58476d1ce4e5b9ull;
        float u = (float)(x >> 40) / 8388608.0f - 1.0f;
        p[i] = __bfloat16_as_ushort(__float2bfloat16_rn(2.0f * u));
    }
}

struct bench_layer {
    buffer<uint8_t> gu, dn;
    buffer<uint16_t> gu_bias, dn_bias;
    buffer<uint32_t> begin, slot_row;
    bench_layer(uint32_t e, uint32_t seed)
        : gu(e * dmk_mxfp4_pack_bytes(5760, 2880)), dn(e * dmk_mxfp4_pack_bytes(2880, 2880)),
          gu_bias((size_t)e * 5760), dn_bias((size_t)e * 2880), begin(e + 1), slot_row(4096 * 4)
    {
        fill<<<1024, 256>>>((uint32_t *)gu.p, gu.n / 4, seed, 0xffffffffu, 0);
        fill<<<1024, 256>>>((uint32_t *)dn.p, dn.n / 4, seed + 1, 0xffffffffu, 0);
        fill_scales<<<1024, 256>>>(gu.p, gu.n / DMK_MXPACK_STAGE_BYTES);
        fill_scales<<<1024, 256>>>(dn.p, dn.n / DMK_MXPACK_STAGE_BYTES);
        fill_bf16<<<64, 256>>>(gu_bias.p, gu_bias.n, seed);
        fill_bf16<<<64, 256>>>(dn_bias.p, dn_bias.n, seed);
        CHECK(cudaDeviceSynchronize());
    }
};

struct times {
    double median, p10, p90;
};

/* A graph of one call per layer, microseconds a layer. */
template <typename F> static struct times time_layers(uint32_t n_layers, F call)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (uint32_t l = 0; l < n_layers; l++) {
        call(l, stream);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<double> us;
    for (int i = 0; i < 33; i++) {
        CHECK(cudaEventRecord(a, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(b, stream));
        CHECK(cudaEventSynchronize(b));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 3) {
            us.push_back(ms * 1e3 / n_layers);
        }
    }
    CHECK(cudaGetLastError());
    std::sort(us.begin(), us.end());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    return {us[us.size() / 2], us[us.size() / 10], us[us.size() * 9 / 10]};
}

static void bench_mx(uint32_t n_experts, const std::vector<uint32_t> &sizes)
{
    const uint32_t n_layers = 6;
    std::vector<bench_layer *> layers;
    for (uint32_t l = 0; l < n_layers; l++) {
        layers.push_back(new bench_layer(n_experts, 100 + l));
    }
    buffer<uint16_t> x((size_t)4096 * 2880), z((size_t)4096 * 4 * 2880);
    buffer<float> y((size_t)4096 * 4 * 2880);
    buffer<uint32_t> scratch(n_experts + 1);
    CHECK(cudaMemset(scratch.p, 0, scratch.n * 4));
    fill_bf16<<<1024, 256>>>(x.p, x.n, 5);
    fill_bf16<<<1024, 256>>>(z.p, z.n, 6);
    printf("mxfp4, %u experts: tokens tile kernel us (p10 p90) GB/s\n", n_experts);
    for (uint32_t rows : sizes) {
        double bytes = 0;
        for (uint32_t l = 0; l < n_layers; l++) {
            struct routing r(rows, 4, n_experts, choose(rows, 4, n_experts, UNIFORM));
            CHECK(cudaMemcpy(layers[l]->begin.p, r.begin.data(), r.begin.size() * 4,
                             cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(layers[l]->slot_row.p, r.slot_row.data(), r.slot_row.size() * 4,
                             cudaMemcpyHostToDevice));
            for (uint32_t e = 0; e < n_experts; e++) {
                bytes += r.begin[e + 1] > r.begin[e] ? 135.0 * 3 * DMK_MXPACK_STAGE_BYTES : 0;
            }
        }
        bytes /= n_layers;
        auto args = [&](uint32_t l) {
            struct dmk_moe_layer_args a = {};
            a.gate_up = {layers[l]->gu.p, nullptr, layers[l]->gu_bias.p, 5760, 2880};
            a.down = {layers[l]->dn.p, nullptr, layers[l]->dn_bias.p, 2880, 2880};
            a.x = x.p;
            a.expert_begin = layers[l]->begin.p;
            a.slot_row = layers[l]->slot_row.p;
            a.z = z.p;
            a.y = y.p;
            a.scratch = scratch.p;
            a.n_rows = rows;
            a.k = 4;
            a.n_experts = n_experts;
            a.alpha = 1.702f;
            a.limit = 7.0f;
            return a;
        };
        for (uint32_t tile = 8; tile <= 24; tile += 8) {
            if ((tile == 8 && rows * 4 > n_experts * 16) || (tile > 8 && rows * 4 < n_experts * 3)) {
                continue;
            }
            const char *names[] = {"fused", "gate_up", "down", "both"};
            for (int mode = 0; mode < 4; mode++) {
                struct times t = time_layers(n_layers, [&](uint32_t l, cudaStream_t s) {
                    struct dmk_moe_layer_args a = args(l);
                    if (mode == 0) {
                        CHECK(dmk_moe_mxfp4(&a, tile, s));
                    }
                    if (mode == 1 || mode == 3) {
                        CHECK(dmk_moe_mxfp4_gate_up(&a, tile, s));
                    }
                    if (mode == 2 || mode == 3) {
                        CHECK(dmk_moe_mxfp4_down(&a, tile, s));
                    }
                });
                double part = mode == 1 ? 2.0 / 3 : mode == 2 ? 1.0 / 3 : 1;
                printf("%5u %3u %-8s %8.1f (%.1f %.1f) %6.0f\n", rows, tile, names[mode], t.median,
                       t.p10, t.p90, bytes * part / t.median / 1e3);
            }
        }
        fflush(stdout);
    }
    for (auto *l : layers) {
        delete l;
    }
}

static void bench_fp8(uint32_t n_experts, const std::vector<uint32_t> &sizes)
{
    const uint32_t n_layers = 2, max_rows = sizes.back();
    struct layer {
        buffer<uint8_t> gu, dn;
        buffer<uint32_t> begin, slot_row, row_slots;
        layer(uint32_t e, uint32_t rows)
            : gu(e * dmk_fp8_pack_bytes(5760, 2880)), dn(e * dmk_fp8_pack_bytes(2880, 2880)),
              begin(e + 1), slot_row(rows * 4), row_slots(rows * 4)
        {
            fill<<<1024, 256>>>((uint32_t *)gu.p, gu.n / 4, 3, 0xffffffffu, 0);
            fill<<<1024, 256>>>((uint32_t *)dn.p, dn.n / 4, 4, 0xffffffffu, 0);
            fill_shifts<<<1024, 128>>>((uint32_t *)gu.p, gu.n / DMK_FP8PACK_PIECE_BYTES);
            fill_shifts<<<1024, 128>>>((uint32_t *)dn.p, dn.n / DMK_FP8PACK_PIECE_BYTES);
        }
    };
    std::vector<layer *> layers;
    for (uint32_t l = 0; l < n_layers; l++) {
        layers.push_back(new layer(n_experts, max_rows));
    }
    buffer<float> scales(std::vector<float>((size_t)n_experts * 45 * 23, 0x1p-7f));
    buffer<uint16_t> bias(std::vector<uint16_t>((size_t)n_experts * 5760, 0x3f00));
    buffer<uint16_t> x((size_t)max_rows * 2880);
    buffer<float> y((size_t)max_rows * 4 * 2880);
    buffer<uint8_t> scratch(dmk_moe_fp8_layout(max_rows, 4, n_experts, 2880, 2880).bytes);
    CHECK(cudaMemset(scratch.p, 0, scratch.n));
    fill_bf16<<<1024, 256>>>(x.p, x.n, 5);
    CHECK(cudaDeviceSynchronize());
    printf("fp8, %u experts: tokens step us (p10 p90) TFLOP/s\n", n_experts);
    for (uint32_t rows : sizes) {
        for (uint32_t l = 0; l < n_layers; l++) {
            struct routing r(rows, 4, n_experts, choose(rows, 4, n_experts, UNIFORM));
            CHECK(cudaMemcpy(layers[l]->begin.p, r.begin.data(), r.begin.size() * 4,
                             cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(layers[l]->slot_row.p, r.slot_row.data(), r.slot_row.size() * 4,
                             cudaMemcpyHostToDevice));
            CHECK(cudaMemcpy(layers[l]->row_slots.p, r.row_slots.data(), r.row_slots.size() * 4,
                             cudaMemcpyHostToDevice));
        }
        const char *names[] = {"all", "quantise", "gate_up", "down"};
        for (int mode = 0; mode < 4; mode++) {
            struct times t = time_layers(n_layers, [&](uint32_t l, cudaStream_t s) {
                struct dmk_moe_layer_args a = {};
                a.gate_up = {layers[l]->gu.p, scales.p, bias.p, 5760, 2880};
                a.down = {layers[l]->dn.p, scales.p, bias.p, 2880, 2880};
                a.x = x.p;
                a.expert_begin = layers[l]->begin.p;
                a.slot_row = layers[l]->slot_row.p;
                a.row_slots = layers[l]->row_slots.p;
                a.y = y.p;
                a.scratch = scratch.p;
                a.n_rows = rows;
                a.k = 4;
                a.n_experts = n_experts;
                a.alpha = 1.702f;
                a.limit = 7.0f;
                CHECK(mode == 0 ? dmk_moe_fp8(&a, s) : dmk_moe_fp8_step(&a, mode - 1, s));
            });
            const double out_rows[] = {8640, 0, 5760, 2880};
            printf("%5u %-8s %8.1f (%.1f %.1f) %6.0f\n", rows, names[mode], t.median, t.p10, t.p90,
                   2.0 * rows * 4 * 2880 * out_rows[mode] / t.median / 1e6);
        }
        fflush(stdout);
    }
    for (auto *l : layers) {
        delete l;
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const char *what = argc > 1 ? argv[1] : "check";
    if (strcmp(what, "tiny") == 0 || strcmp(what, "tiny8") == 0) {
        struct weights gu(4, 2 * 96, 160, true), dn(4, 160, 96, false);
        device_weights dgu(gu), ddn(dn);
        check_pack(gu, true);
        check_pack(dn, false);
        if (strcmp(what, "tiny") == 0) {
            check_mx(dgu, ddn, 9, UNIFORM);
            check_mx(dgu, ddn, 33, UNIFORM);
        } else {
            check_fp8(dgu, ddn, 9, UNIFORM);
            check_fp8(dgu, ddn, 40, UNIFORM);
            check_fp8(dgu, ddn, 130, UNIFORM); /* two warpgroups instead of four */
        }
        printf(n_failed ? "%d FAILED\n" : "all passed\n", n_failed);
        return n_failed != 0;
    }
    if (strcmp(what, "check") == 0 || strcmp(what, "check8") == 0) {
        uint32_t seed = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
        seed_state = seed;
        printf("seed %u\n", seed);
        {
            /* The tiny model's kind of sizes: no multiple of any tile. */
            struct weights gu(16, 2 * 96, 160, true), dn(16, 160, 96, false);
            device_weights dgu(gu), ddn(dn);
            for (uint32_t rows : {1u, 7u, 33u, 200u}) {
                strcmp(what, "check") == 0 ? check_mx(dgu, ddn, rows, UNIFORM)
                                           : check_fp8(dgu, ddn, rows, UNIFORM);
            }
        }
        struct weights gu(8, 5760, 2880, true), dn(8, 2880, 2880, false);
        device_weights dgu(gu), ddn(dn);
        check_pack(gu, true);
        check_pack(dn, false);
        const struct {
            uint32_t rows;
            enum spread how;
        } cases[] = {{1, UNIFORM},     {2, UNIFORM},    {9, SOME_EMPTY}, {40, SKEWED},
                     {31, ONE_EXPERT}, {64, UNIFORM},   {100, SOME_REMOTE}};
        for (auto &c : cases) {
            strcmp(what, "check") == 0 ? check_mx(dgu, ddn, c.rows, c.how)
                                       : check_fp8(dgu, ddn, c.rows, c.how);
        }
        if (strcmp(what, "check8") == 0) {
            check_fp8(dgu, ddn, 600, UNIFORM);
            check_fp8(dgu, ddn, 300, SKEWED);
        }
        printf(n_failed ? "%d FAILED\n" : "all passed\n", n_failed);
        return n_failed != 0;
    }
    if (strcmp(what, "short") == 0) {
        seed_state = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
        struct weights gu(4, 5760, 2880, true), dn(4, 2880, 2880, false);
        device_weights dgu(gu), ddn(dn);
        check_pack(gu, true);
        check_pack(dn, false);
        check_mx(dgu, ddn, 9, SOME_EMPTY);
        check_mx(dgu, ddn, 40, SKEWED);
        printf(n_failed ? "%d FAILED\n" : "all passed\n", n_failed);
        return n_failed != 0;
    }
    std::vector<uint32_t> sizes;
    for (int i = 2; i < argc; i++) {
        sizes.push_back((uint32_t)atoi(argv[i]));
    }
    if (strcmp(what, "bench") == 0) {
        bench_mx(128, !sizes.empty() ? sizes : std::vector<uint32_t>{1, 2, 4, 8, 16, 32, 64, 128, 256});
    } else if (strcmp(what, "quick") == 0) {
        bench_mx(128, {1, 64});
    } else if (strcmp(what, "quick8") == 0) {
        bench_fp8(128, {8192});
    } else if (strcmp(what, "bench20") == 0) {
        bench_mx(32, !sizes.empty() ? sizes : std::vector<uint32_t>{1, 8, 32, 64, 128, 256});
    } else if (strcmp(what, "bench8") == 0) {
        bench_fp8(128, {1024, 2048, 8192, 16384});
    } else if (strcmp(what, "bench820") == 0) {
        bench_fp8(32, {1024, 8192});
    }
    return 0;
}
