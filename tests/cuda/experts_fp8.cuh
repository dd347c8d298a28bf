/* The FP8 half of tests/cuda/experts.cu. */

struct fp8_run {
    std::vector<float> y;
    std::vector<float> x, z; /* [slots][cols], what the codes and scales say */
    std::vector<uint8_t> x_codes;
};

static std::vector<float> read_positions(const std::vector<uint8_t> &raw, size_t codes, size_t scales,
                                         uint32_t n_positions, uint32_t cols, const struct routing &r,
                                         std::vector<uint8_t> *ret_codes)
{
    std::vector<float> out((size_t)r.n_slots * cols);
    uint32_t first = 0;
    for (uint32_t e = 0; e < r.n_experts; e++) {
        for (uint32_t s = r.begin[e]; s < r.begin[e + 1]; s++) {
            uint32_t position = first + s - r.begin[e];
            for (uint32_t c = 0; c < cols; c++) {
                size_t at = (size_t)(c / 128) * n_positions + position;
                float scale;
                uint32_t low = position % 16, moved = (low >> 1 & 3) << 2 | low >> 3 << 1 | (low & 1);
                memcpy(&scale, &raw[scales + (at - low + moved) * 4], 4);
                uint8_t code = raw[codes + at * 128 + ((c % 128 / 16) ^ (position % 8)) * 16 + c % 16];
                out[(size_t)s * cols + c] = dmk_e4m3_to_f32(code) * scale;
                if (ret_codes) {
                    ret_codes->push_back(code);
                }
            }
        }
        first += (r.begin[e + 1] - r.begin[e] + 15) / 16 * 16;
    }
    return out;
}

static struct fp8_run run_fp8(const struct device_weights &gu, const struct device_weights &dn,
                              const struct routing &r, const std::vector<uint16_t> &x, bool read)
{
    uint32_t hidden = dn.w.rows, inter = dn.w.cols;
    struct dmk_moe_fp8_layout l = dmk_moe_fp8_layout(r.n_rows, r.k, r.n_experts, hidden, inter);
    buffer<uint16_t> dx(x);
    buffer<float> y((size_t)(r.n_slots + 1) * hidden);
    buffer<uint32_t> begin(r.begin), slot_row(r.slot_row), row_slots(r.row_slots);
    buffer<uint8_t> scratch(l.bytes);
    scratch.poison();
    y.poison();
    struct dmk_moe_layer_args a = {};
    a.gate_up = gu.matrix(true);
    a.down = dn.matrix(true);
    a.x = dx.p;
    a.expert_begin = begin.p;
    a.slot_row = slot_row.p;
    a.row_slots = row_slots.p;
    a.y = y.p;
    a.scratch = scratch.p;
    a.n_rows = r.n_rows;
    a.k = r.k;
    a.n_experts = r.n_experts;
    a.alpha = 1.702f;
    a.limit = 7.0f;
    CHECK(dmk_moe_fp8(&a, 0));
    CHECK(cudaDeviceSynchronize());
    struct fp8_run out;
    out.y = y.get();
    for (uint32_t i = 0; i < hidden; i++) {
        uint32_t bits;
        memcpy(&bits, &out.y[(size_t)r.n_slots * hidden + i], 4);
        expect(bits == 0xffffffffu, "fp8", "y past the end", i);
    }
    if (read) {
        std::vector<uint8_t> raw = scratch.get();
        out.x = read_positions(raw, l.x, l.x_scales, l.n_positions, hidden, r, &out.x_codes);
        out.z = read_positions(raw, l.z, l.z_scales, l.n_positions, inter, r, nullptr);
    }
    return out;
}

/* In place: what quantising to E4M3 per 128 values leaves. */
static void quantise_rows(std::vector<float> &v, uint32_t cols, std::vector<uint8_t> *ret_codes)
{
    for (size_t row = 0; row < v.size() / cols; row++) {
        for (uint32_t c0 = 0; c0 < cols; c0 += 128) {
            float amax = 0x1p-100f, *p = &v[row * cols + c0];
            uint32_t n = std::min(128u, cols - c0);
            for (uint32_t i = 0; i < n; i++) {
                amax = fmaxf(amax, fabsf(p[i]));
            }
            float scale = amax / 448.0f, inv = 448.0f / amax;
            for (uint32_t i = 0; i < n; i++) {
                uint8_t code = dmk_f32_to_e4m3(p[i] * inv);
                if (ret_codes) {
                    ret_codes->push_back(code);
                }
                p[i] = dmk_e4m3_to_f32(code) * scale;
            }
        }
    }
}

static void check_fp8(const struct device_weights &gu, const struct device_weights &dn, uint32_t rows,
                      enum spread how)
{
    char what[80];
    uint32_t hidden = dn.w.rows, inter = dn.w.cols;
    snprintf(what, sizeof(what), "fp8 %u rows, spread %d, %u x %u", rows, how, hidden, inter);
    struct routing r(rows, 4, gu.w.n_experts, choose(rows, 4, gu.w.n_experts, how));
    std::vector<uint16_t> x((size_t)rows * hidden);
    for (auto &v : x) {
        v = dmk_f32_to_bf16(random_normal());
    }
    size_t n_z = (size_t)r.n_slots * inter, n_y = (size_t)r.n_slots * hidden;
    struct fp8_run first = run_fp8(gu, dn, r, x, true);
    std::vector<float> xs((size_t)r.n_slots * hidden);
    for (size_t s = 0; s < r.n_slots; s++) {
        for (uint32_t c = 0; c < hidden; c++) {
            xs[s * hidden + c] = dmk_bf16_to_f32(x[(size_t)r.slot_row[s] * hidden + c]);
        }
    }
    std::vector<uint8_t> codes;
    quantise_rows(xs, hidden, &codes);
    expect(codes == first.x_codes, what, "codes of x differ", 0);
    expect(memcmp(xs.data(), first.x.data(), xs.size() * 4) == 0, what, "x differs", 0);
    std::vector<double> h = gu.apply(r, xs, false);
    std::vector<float> z(n_z);
    for (size_t s = 0; s < r.n_slots; s++) {
        for (uint32_t j = 0; j < inter; j++) {
            double v = swiglu(h[s * 2 * inter + 2 * j], h[s * 2 * inter + 2 * j + 1]);
            z[s * inter + j] = dmk_bf16_to_f32(dmk_f32_to_bf16((float)v));
        }
    }
    std::vector<double> exact(z.begin(), z.end());
    quantise_rows(z, inter, nullptr);
    std::vector<double> got(first.z.begin(), first.z.end());
    double dz = distance(got, std::vector<double>(z.begin(), z.end())), dq = distance(got, exact);
    std::vector<double> want_y = dn.apply(r, first.z, false);
    double dy = distance(std::vector<double>(first.y.begin(), first.y.begin() + n_y), want_y);
    printf("%s: z %.2e (from unquantised %.2e) y %.2e\n", what, dz, dq, dy);
    expect(dz < 8e-3, what, "distance of z", dz);
    expect(dq < 4e-2, what, "distance of z from unquantised", dq);
    expect(dy < 1e-3, what, "distance of y", dy);
    for (int again = 0; again < 4; again++) {
        struct fp8_run other = run_fp8(gu, dn, r, x, false);
        expect(memcmp(other.y.data(), first.y.data(), n_y * 4) == 0, what, "y differs", again);
    }
    /* A third of the rows alone: other tile widths. */
    if (rows > 3) {
        uint32_t part = rows / 3;
        std::vector<uint32_t> ids, mine;
        for (uint32_t t = 0; t < part; t++) {
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t s = r.row_slots[(size_t)t * 4 + i], e = 0;
                while (s != 0xffffffffu && r.begin[e + 1] <= s) {
                    e++;
                }
                ids.push_back(s == 0xffffffffu ? 0xffffu : e);
            }
        }
        struct routing few(part, 4, gu.w.n_experts, ids);
        std::vector<uint16_t> x1(x.begin(), x.begin() + (size_t)part * hidden);
        struct fp8_run some = run_fp8(gu, dn, few, x1, false);
        for (uint32_t i = 0; i < part * 4; i++) {
            if (few.row_slots[i] != 0xffffffffu) {
                expect(memcmp(&some.y[(size_t)few.row_slots[i] * hidden],
                              &first.y[(size_t)r.row_slots[i] * hidden], hidden * 4) == 0,
                       what, "row in other company differs", i / 4);
            }
        }
    }
}
