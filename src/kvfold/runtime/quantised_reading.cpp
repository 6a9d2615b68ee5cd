// The fused path of quantised_reading.py: decode attention over packed TurboQuant codes.
//
// A tile of a few slots is unpacked into floats that stay in the first-level cache and is used at
// once, so the history is read as codes and never written as floats. The layout of codes is that
// of kvfold.methods.turboquant.pack; at 8 bits they are signed bytes.
//
// One file, though long, so that one compiler call makes it and one hash names it.
//
// Plain C++17 and vector extensions of GCC and Clang. What a wider instruction set adds is the
// lookup of levels; elsewhere the portable loops below do the same.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using Index = std::int64_t;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

constexpr int TILE = 8;                // slots unpacked together
constexpr int ROWS = 4;                // of a tile, that are multiplied together
constexpr int QUERIES = LANES / ROWS;  // so that their products' sums fill one vector
constexpr int MIXED = 4;               // queries that a tile is mixed for together
constexpr Index CHUNK = 512;           // slots of a task; results don't depend on threads
constexpr float UNIFORM_LEVEL = 1.0f / 32;

// The small loops below must vanish: their arrays are meant to be registers.
#define UNROLL _Pragma("GCC unroll 16")

inline Vector load(const float* from) {
    Vector made;
    std::memcpy(&made, from, sizeof made);
    return made;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

// From float16, also where subnormal numbers are flushed to zero.
inline float from_half(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7fffu;
    std::uint32_t bits;
    if (magnitude < 0x0400u) {
        const float value = float(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &value, sizeof bits);
    } else {
        bits = magnitude < 0x7c00u ? (magnitude << 13) + 0x38000000u : (magnitude << 13) | 0x7f800000u;
    }
    bits |= std::uint32_t(half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Where lane `lane` of a fold comes from: a and b hold `groups` groups of lanes each, and every
// group is halved.
constexpr int fold_source(int lane, int groups, bool high) {
    const int half = LANES / groups / 2, within = lane % (LANES / 2);
    return (lane < LANES / 2 ? 0 : LANES) + within / half * half * 2 + within % half +
           (high ? half : 0);
}

#if defined(__clang__)
template <int GROUPS, bool HIGH, int... LANE>
inline Vector pick(Vector a, Vector b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, fold_source(LANE, GROUPS, HIGH)...);
}
template <int GROUPS, bool HIGH>
inline Vector pick(Vector a, Vector b) {
    return pick<GROUPS, HIGH>(a, b, std::make_integer_sequence<int, LANES>());
}
#else
template <int GROUPS, bool HIGH>
inline Vector pick(Vector a, Vector b) {
    typedef std::int32_t Lanes __attribute__((vector_size(LANES * sizeof(std::int32_t))));
    Lanes from;
    UNROLL for (int lane = 0; lane < LANES; lane++) from[lane] = fold_source(lane, GROUPS, HIGH);
    return __builtin_shuffle(a, b, from);
}
#endif

// The sums over lanes of 2 * GROUPS vectors, in the vectors' order; sums<LANES / 2> has one a lane.
template <int GROUPS>
inline Vector sums(const Vector* of) {
    if constexpr (GROUPS == 0) {
        return *of;
    } else {
        const Vector a = sums<GROUPS / 2>(of), b = sums<GROUPS / 2>(of + GROUPS);
        return pick<GROUPS, false>(a, b) + pick<GROUPS, true>(a, b);
    }
}

// One plane of a row: fields of BITS bits into codes[0 .. 8 / BITS * bytes), above `shift` bits
// that are there already, if any.
template <int BITS>
inline void unpack_plane(const std::uint8_t* row, Index bytes, int shift, std::uint8_t* codes) {
    constexpr std::uint64_t mask = 0x0101010101010101u * ((1u << BITS) - 1);
    for (int field = 0; field < 8 / BITS; field++) {
        std::uint8_t* to = codes + field * bytes;
        Index j = 0;
        for (; j + 8 <= bytes; j += 8) {
            std::uint64_t word, lower = 0;
            std::memcpy(&word, row + j, 8);
            if (shift) std::memcpy(&lower, to + j, 8);
            word = ((word >> (field * BITS)) & mask) << shift | lower;
            std::memcpy(to + j, &word, 8);
        }
        for (; j < bytes; j++) {
            const int code = (row[j] >> (field * BITS) & ((1 << BITS) - 1)) << shift;
            to[j] = std::uint8_t(shift ? to[j] | code : code);
        }
    }
}

template <int BITS>
inline void unpack_row(const std::uint8_t* row, Index width, std::uint8_t* codes) {
    int shift = 0;
    if constexpr (BITS & 4) {
        unpack_plane<4>(row, (width + 1) / 2, shift, codes);
        row += (width + 1) / 2;
        shift += 4;
    }
    if constexpr (BITS & 2) {
        unpack_plane<2>(row, (width + 3) / 4, shift, codes);
        row += (width + 3) / 4;
        shift += 2;
    }
    if constexpr (BITS & 1) unpack_plane<1>(row, (width + 7) / 8, shift, codes);
}

// LANES signed bytes as floats; LANES codes as levels, or those in a field of LANES bytes.
#if defined(__AVX512F__)
inline __m128i bytes_at(const void* from) { return _mm_loadu_si128((const __m128i*)from); }

inline Vector floats(const std::int8_t* from) {
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_at(from)));
}

template <int BITS>
struct Lookup {
    static constexpr int PARTS = BITS <= 4 ? 1 : 1 << (BITS - 4);
    __m512 part[PARTS];

    explicit Lookup(const float* levels) {
        for (int i = 0; i < PARTS; i++) part[i] = _mm512_loadu_ps(levels + 16 * i);
    }
    __m512 among(const __m512* of, __m512i at) const { return _mm512_permutex2var_ps(of[0], at, of[1]); }
    __m512 among4(const __m512* of, __m512i at) const {
        const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
        return _mm512_mask_blend_ps(upper, among(of, at), among(of + 2, at));
    }
    Vector operator()(__m512i at) const {
        if constexpr (PARTS == 1) return (Vector)_mm512_permutexvar_ps(at, part[0]);
        if constexpr (PARTS == 2) return (Vector)among(part, at);
        if constexpr (PARTS == 4) return (Vector)among4(part, at);
        if constexpr (PARTS == 8) {
            const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(64));
            return (Vector)_mm512_mask_blend_ps(upper, among4(part, at), among4(part + 4, at));
        }
    }
    Vector operator()(const std::uint8_t* codes) const {
        return (*this)(_mm512_cvtepu8_epi32(bytes_at(codes)));
    }
    Vector field(const std::uint8_t* bytes, int shift) const {
        const __m512i word = _mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes_at(bytes)), shift);
        return (*this)(_mm512_and_si512(word, _mm512_set1_epi32((1 << BITS) - 1)));
    }
};
#elif defined(__AVX2__)
inline __m128i bytes_at(const void* from) { return _mm_loadl_epi64((const __m128i*)from); }

inline Vector floats(const std::int8_t* from) {
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_at(from)));
}

template <int BITS>
struct Lookup {
    const float* levels;
    __m256 low_part, high_part;

    explicit Lookup(const float* of)
        : levels(of), low_part(_mm256_loadu_ps(of)), high_part(_mm256_loadu_ps(of + 8)) {}
    Vector operator()(__m256i at) const {
        if constexpr (BITS <= 3) return (Vector)_mm256_permutevar8x32_ps(low_part, at);
        if constexpr (BITS == 4) {
            const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
            return (Vector)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low_part, at),
                                            _mm256_permutevar8x32_ps(high_part, at), upper);
        }
        if constexpr (BITS > 4) return (Vector)_mm256_i32gather_ps(levels, at, 4);
    }
    Vector operator()(const std::uint8_t* codes) const {
        return (*this)(_mm256_cvtepu8_epi32(bytes_at(codes)));
    }
    Vector field(const std::uint8_t* bytes, int shift) const {
        const __m256i word = _mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes_at(bytes)), shift);
        return (*this)(_mm256_and_si256(word, _mm256_set1_epi32((1 << BITS) - 1)));
    }
};
#else
inline Vector floats(const std::int8_t* from) {
    typedef std::int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, from, LANES);
    return __builtin_convertvector(bytes, Vector);
}

template <int BITS>
struct Lookup {
    const float* levels;

    explicit Lookup(const float* of) : levels(of) {}
    Vector operator()(const std::uint8_t* codes) const {
        Vector made;
        UNROLL for (int lane = 0; lane < LANES; lane++) made[lane] = levels[codes[lane]];
        return made;
    }
    Vector field(const std::uint8_t* bytes, int shift) const {
        Vector made;
        UNROLL for (int lane = 0; lane < LANES; lane++)
            made[lane] = levels[bytes[lane] >> shift & ((1 << BITS) - 1)];
        return made;
    }
};
#endif

// Stored vectors of (batch, heads, slots): strides of codes in bytes, of scales in values.
struct Slots {
    const std::uint8_t* codes;
    const std::uint16_t* scales;
    const float* levels;
    Index batch, heads, slots, width;
    Index code_batch, code_head, code_slot;
    Index scale_batch, scale_head, scale_slot;
    int bits;

    Index padded() const { return (width + LANES - 1) / LANES * LANES; }
    Index chunks() const { return (slots + CHUNK - 1) / CHUNK; }
    Index tasks() const { return batch * heads * chunks(); }
};

// Rows of packed codes as levels, `padded` apart in `values`; what lies past the width is finite.
// `scratch`, as long, is zero at first.
using Unpack = void (*)(const Slots& slots, const std::uint8_t* rows, int count,
                        std::uint8_t* scratch, float* values);

void unpack_signed(const Slots& slots, const std::uint8_t* rows, int count, std::uint8_t*,
                   float* values) {
    for (int i = 0; i < count; i++) {
        const std::int8_t* from = (const std::int8_t*)(rows + i * slots.code_slot);
        float* to = values + i * slots.padded();
        Index j = 0;
        for (; j + LANES <= slots.width; j += LANES)
            store(to + j, floats(from + j) * UNIFORM_LEVEL);
        for (; j < slots.width; j++) to[j] = float(from[j]) * UNIFORM_LEVEL;
    }
}

template <int BITS>
void unpack_levels(const Slots& slots, const std::uint8_t* rows, int count, std::uint8_t* scratch,
                   float* values) {
    const Lookup<BITS> lookup(slots.levels);
    constexpr int FIELDS = 8 / BITS;
    const Index padded = slots.padded(), bytes = slots.width / FIELDS;
    if (8 % BITS == 0 && slots.width % (FIELDS * LANES) == 0) {
        for (int i = 0; i < count; i++) {
            const std::uint8_t* from = rows + i * slots.code_slot;
            float* to = values + i * padded;
            for (Index j = 0; j < bytes; j += LANES)
                UNROLL for (int k = 0; k < FIELDS; k++)
                    store(to + k * bytes + j, lookup.field(from + j, k * BITS));
        }
        return;
    }
    for (int i = 0; i < count; i++)
        unpack_row<BITS>(rows + i * slots.code_slot, slots.width, scratch + i * padded);
    for (Index j = 0; j < count * padded; j += LANES) store(values + j, lookup(scratch + j));
}

Unpack unpacker(int bits) {
    switch (bits) {
        case 1: return unpack_levels<1>;
        case 2: return unpack_levels<2>;
        case 3: return unpack_levels<3>;
        case 4: return unpack_levels<4>;
        case 5: return unpack_levels<5>;
        case 6: return unpack_levels<6>;
        case 7: return unpack_levels<7>;
        default: return unpack_signed;
    }
}

// A few slots of one head, as floats.
class Tile {
  public:
    float scale[TILE];

    Tile(const Slots& from, Index head)
        : slots(from),
          codes(from.codes + head / from.heads * from.code_batch +
                head % from.heads * from.code_head),
          scales(from.scales + head / from.heads * from.scale_batch +
                 head % from.heads * from.scale_head),
          unpack(unpacker(from.bits)),
          scratch(TILE * from.padded(), 0),
          values(TILE * from.padded(), 0.0f) {}

    const float* row(int slot) const { return values.data() + slot * slots.padded(); }

    void fill(Index first, int count) {
        for (int i = 0; i < TILE; i++)
            scale[i] = i < count ? from_half(scales[(first + i) * slots.scale_slot]) : 0.0f;
        unpack(slots, codes + first * slots.code_slot, count, scratch.data(), values.data());
    }

  private:
    const Slots& slots;
    const std::uint8_t* codes;
    const std::uint16_t* scales;
    const Unpack unpack;
    std::vector<std::uint8_t> scratch;
    std::vector<float> values;
};

// Products of ROWS rows of a tile with QUERIES queries: lane query * ROWS + row.
inline Vector products(const float* rows, const float* queries, Index padded) {
    Vector partial[LANES] = {};
    for (Index j = 0; j < padded; j += LANES) {
        Vector row[ROWS];
        UNROLL for (int i = 0; i < ROWS; i++) row[i] = load(rows + i * padded + j);
        UNROLL for (int q = 0; q < QUERIES; q++) {
            const Vector query = load(queries + q * padded + j);
            UNROLL for (int i = 0; i < ROWS; i++) partial[q * ROWS + i] += query * row[i];
        }
    }
    return sums<LANES / 2>(partial);
}

void logits(const Slots& slots, const float* queries, Index grouped, float* out, int threads) {
    const Index padded = slots.padded(), width = slots.width;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (Index task = 0; task < slots.tasks(); task++) {
        const Index head = task / slots.chunks(), start = task % slots.chunks() * CHUNK;
        const Index stop = std::min(slots.slots, start + CHUNK);
        std::vector<float> own((grouped + QUERIES) * padded, 0.0f);
        for (Index q = 0; q < grouped; q++)
            std::memcpy(&own[q * padded], queries + (head * grouped + q) * width,
                        width * sizeof(float));
        Tile tile(slots, head);
        for (Index first = start; first < stop; first += TILE) {
            const int count = int(std::min<Index>(TILE, stop - first));
            tile.fill(first, count);
            for (int row = 0; row < count; row += ROWS) {
                for (Index q = 0; q < grouped; q += QUERIES) {
                    float found[LANES];
                    store(found, products(tile.row(row), &own[q * padded], padded));
                    for (Index k = 0; k < std::min<Index>(QUERIES, grouped - q); k++) {
                        float* to = out + (head * grouped + q + k) * slots.slots + first + row;
                        for (int i = 0; i < std::min(ROWS, count - row); i++)
                            to[i] = found[k * ROWS + i] * tile.scale[row + i];
                    }
                }
            }
        }
    }
}

// Adds to MIXED sums the rows of a tile, each times its weight.
inline void add_rows(const float* rows, const float weights[MIXED][TILE], Index padded, float* to) {
    for (Index j = 0; j < padded; j += LANES) {
        Vector sum[MIXED];
        UNROLL for (int q = 0; q < MIXED; q++) sum[q] = load(to + q * padded + j);
        UNROLL for (int i = 0; i < TILE; i++) {
            const Vector row = load(rows + i * padded + j);
            UNROLL for (int q = 0; q < MIXED; q++) sum[q] += weights[q][i] * row;
        }
        UNROLL for (int q = 0; q < MIXED; q++) store(to + q * padded + j, sum[q]);
    }
}

struct Weights {
    const float* values;
    Index batch, head, query;
};

void mix(const Slots& slots, const Weights& weights, Index grouped, float* out, int threads) {
    const Index padded = slots.padded(), width = slots.width, chunks = slots.chunks();
    std::vector<float> partial(slots.tasks() * grouped * width);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (Index task = 0; task < slots.tasks(); task++) {
        const Index head = task / chunks, start = task % chunks * CHUNK;
        const Index stop = std::min(slots.slots, start + CHUNK);
        const float* own = weights.values + head / slots.heads * weights.batch +
                           head % slots.heads * weights.head;
        std::vector<float> sum((grouped + MIXED) * padded, 0.0f);
        Tile tile(slots, head);
        for (Index first = start; first < stop; first += TILE) {
            const int count = int(std::min<Index>(TILE, stop - first));
            tile.fill(first, count);
            for (Index q = 0; q < grouped; q += MIXED) {
                float scaled[MIXED][TILE] = {};
                for (Index k = 0; k < std::min<Index>(MIXED, grouped - q); k++)
                    for (int i = 0; i < count; i++)
                        scaled[k][i] = own[(q + k) * weights.query + first + i] * tile.scale[i];
                add_rows(tile.row(0), scaled, padded, &sum[q * padded]);
            }
        }
        for (Index q = 0; q < grouped; q++)
            std::memcpy(&partial[(task * grouped + q) * width], &sum[q * padded],
                        width * sizeof(float));
    }
    for (Index head = 0; head < slots.batch * slots.heads; head++) {
        float* to = out + head * grouped * width;
        std::fill(to, to + grouped * width, 0.0f);
        for (Index chunk = 0; chunk < chunks; chunk++) {
            const float* from = &partial[(head * chunks + chunk) * grouped * width];
            for (Index j = 0; j < grouped * width; j++) to[j] += from[j];
        }
    }
}

}  // namespace

// All pointers are to memory of the host. queries (batch, heads, grouped, width) and out are
// contiguous; levels holds at least 16 values, 2**bits where bits is less than 8.

extern "C" void kvfold_slot_logits(
    const float* queries, const std::uint8_t* codes, const std::uint16_t* scales,
    const float* levels, float* out, Index batch, Index heads, Index grouped, Index slots,
    Index width, Index code_batch, Index code_head, Index code_slot, Index scale_batch,
    Index scale_head, Index scale_slot, int bits, int threads) {
    const Slots stored = {codes,      scales,    levels,    batch,       heads,      slots,     width,
                          code_batch, code_head, code_slot, scale_batch, scale_head, scale_slot, bits};
    logits(stored, queries, grouped, out, threads);
}

extern "C" void kvfold_slot_mix(
    const float* weights, const std::uint8_t* codes, const std::uint16_t* scales,
    const float* levels, float* out, Index batch, Index heads, Index grouped, Index slots,
    Index width, Index code_batch, Index code_head, Index code_slot, Index scale_batch,
    Index scale_head, Index scale_slot, Index weight_batch, Index weight_head, Index weight_query,
    int bits, int threads) {
    const Slots stored = {codes,      scales,    levels,    batch,       heads,      slots,     width,
                          code_batch, code_head, code_slot, scale_batch, scale_head, scale_slot, bits};
    const Weights given = {weights, weight_batch, weight_head, weight_query};
    mix(stored, given, grouped, out, threads);
}
