/* Reductions of tensors in main memory, each in one pass. `compiler.py` builds this file, `native.py` calls it.
 *
 * Elements are read as bits: the largest bits without the sign are the largest absolute value, they say whether
 * anything is not finite, and every compiler vectorises an integer maximum. Squares are summed in float over a chunk
 * that stays in cache, in double over chunks; a chunk whose float sum left the range in which it is exact is summed
 * again in double. Sums run in lanes, which vectorises them and keeps additions from waiting for each other. A compiler
 * may reorder sums (-fassociative-math): nothing here depends on their order. Addresses need no alignment.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))
#define RARE static __attribute__((noinline))

typedef uint16_t raw16 __attribute__((aligned(1), may_alias));
typedef int32_t raw32 __attribute__((aligned(1), may_alias));
typedef int64_t raw64 __attribute__((aligned(1), may_alias));

enum { CHUNK = 2048, LANES = 64 };

/* Sums of squares below it may lack some that underflowed; those above FLT_MAX are inf. */
#define LEAST_SUM 0x1p-90f
#define EXACT(sum) ((sum) >= LEAST_SUM && (sum) <= FLT_MAX)

INLINED float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED double double_of(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Subnormals as an integer times 2^-24, so that no subnormal float is made on the way. inf and NaN come out finite:
 * whoever asks knows from the bits. */
INLINED float half_of(int32_t bits) {
    return bits < 0x400 ? (float)bits * 0x1p-24f : float_of((bits << 13) + 0x38000000);
}

INLINED double wide_half_of(int32_t raw) {
    int32_t bits = raw & 0x7fff;
    double magnitude = bits < 0x7c00 ? half_of(bits) : bits > 0x7c00 ? NAN : INFINITY;
    return raw & 0x8000 ? -magnitude : magnitude;
}

/* What a dtype is. BITS_: an element without its sign, as an integer that orders like the magnitude. INF_: those of
 * inf. MAGNITUDE_: a value to be squared, from what was read. SIGNED_: the value. WIDE_: the value in double. */

#define BITS_f32(raw) ((raw) & 0x7fffffff)
#define INF_f32 0x7f800000
#define MAGNITUDE_f32(raw) float_of(raw)
#define SIGNED_f32(raw) float_of(raw)
#define WIDE_f32(raw) ((double)float_of(raw))
#define LARGEST_f32(bits) WIDE_f32(bits)

#define BITS_f64(raw) ((raw) & INT64_MAX)
#define INF_f64 0x7ff0000000000000
#define MAGNITUDE_f64(raw) double_of(raw)
#define SIGNED_f64(raw) double_of(raw)
#define WIDE_f64(raw) double_of(raw)
#define LARGEST_f64(bits) double_of(bits)

#define BITS_bf16(raw) (((raw) & 0x7fff) << 16)
#define INF_bf16 0x7f800000
#define MAGNITUDE_bf16(raw) float_of(BITS_bf16(raw))
#define SIGNED_bf16(raw) float_of((int32_t)((uint32_t)(raw) << 16))
#define WIDE_bf16(raw) ((double)SIGNED_bf16(raw))
#define LARGEST_bf16(bits) WIDE_f32(bits)

#define BITS_f16(raw) ((raw) & 0x7fff)
#define INF_f16 0x7c00
#define MAGNITUDE_f16(raw) half_of(BITS_f16(raw))
#define SIGNED_f16(raw) ((raw) & 0x8000 ? -half_of(BITS_f16(raw)) : half_of(BITS_f16(raw)))
#define WIDE_f16(raw) wide_half_of(raw)
#define LARGEST_f16(bits) wide_half_of(bits)

#define ROOT_float sqrtf
#define ROOT_double sqrt

typedef struct {
    double squares; /* inf or NaN where an element is */
    double norm;    /* finite where every element is */
    double largest;
    double nonfinite;
    double zeros;
} Statistics;

/* RAW is what an element is read as, INT what its bits are kept in, REAL what its square is summed in. */
#define DEFINE(T, RAW, INT, REAL)                                                                                      \
    INLINED INT most_##T(const RAW *x, int64_t n) {                                                                    \
        INT most = 0;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            INT bits = BITS_##T(x[i]);                                                                                 \
            most = bits > most ? bits : most;                                                                          \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    RARE double nonfinite_##T(const RAW *x, int64_t n) {                                                               \
        int64_t count = 0;                                                                                             \
        for (int64_t i = 0; i < n; i++)                                                                                \
            count += BITS_##T(x[i]) >= INF_##T;                                                                        \
        return (double)count;                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    RARE double wide_squares_##T(const RAW *x, int64_t n, double unit) {                                               \
        double sum = 0;                                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            double value = WIDE_##T(x[i]) * unit;                                                                      \
            sum += value * value;                                                                                      \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    /* Largest bits and sum of squares of one chunk, and the number of its zeros if `count_zeros`. */                  \
    INLINED INT chunk_##T(const RAW *x, int n, const int count_zeros, REAL *squares, double *zeros) {                  \
        REAL sums[LANES] = {0}, sum = 0;                                                                               \
        INT mosts[LANES] = {0}, nothings[LANES] = {0}, most = 0, nothing = 0;                                          \
        int i = 0;                                                                                                     \
        for (; i + LANES <= n; i += LANES)                                                                             \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                INT raw = x[i + lane], bits = BITS_##T(raw);                                                           \
                REAL magnitude = MAGNITUDE_##T(raw);                                                                   \
                mosts[lane] = bits > mosts[lane] ? bits : mosts[lane];                                                 \
                sums[lane] += magnitude * magnitude;                                                                   \
                if (count_zeros)                                                                                       \
                    nothings[lane] += bits == 0;                                                                       \
            }                                                                                                          \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
            most = mosts[lane] > most ? mosts[lane] : most;                                                            \
            sum += sums[lane];                                                                                         \
            nothing += nothings[lane];                                                                                 \
        }                                                                                                              \
        for (; i < n; i++) {                                                                                           \
            INT raw = x[i], bits = BITS_##T(raw);                                                                      \
            REAL magnitude = MAGNITUDE_##T(raw);                                                                       \
            most = bits > most ? bits : most;                                                                          \
            sum += magnitude * magnitude;                                                                              \
            if (count_zeros)                                                                                           \
                nothing += bits == 0;                                                                                  \
        }                                                                                                              \
        *squares = sum;                                                                                                \
        *zeros += (double)nothing;                                                                                     \
        return most;                                                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    /* Adds one chunk to `all` and returns its largest bits. */                                                        \
    INLINED INT add_##T(Statistics *all, const RAW *x, int n, const int count_zeros) {                                 \
        REAL squares;                                                                                                  \
        INT bits = chunk_##T(x, n, count_zeros, &squares, &all->zeros);                                                \
        if (bits >= INF_##T)                                                                                           \
            all->nonfinite += nonfinite_##T(x, n);                                                                     \
        else if (sizeof(REAL) == sizeof(float) && bits && !EXACT(squares))                                             \
            all->squares += wide_squares_##T(x, n, 1.0);                                                               \
        else                                                                                                           \
            all->squares += squares;                                                                                   \
        return bits;                                                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    /* What follows from all chunks together. */                                                                       \
    INLINED void finish_##T(Statistics *all, const RAW *x, int64_t n, INT most) {                                      \
        all->largest = LARGEST_##T(most);                                                                              \
        if (most >= INF_##T) {                                                                                         \
            all->squares = all->norm = all->largest; /* inf, or NaN if there is one */                                 \
            return;                                                                                                    \
        }                                                                                                              \
        all->norm = sqrt(all->squares);                                                                                \
        if (most && !(all->squares >= 0x1p-900 && all->squares <= DBL_MAX)) {                                          \
            int power = ilogb(all->largest);                                                                           \
            power = power > 1022 ? 1022 : power < -1022 ? -1022 : power;                                               \
            all->norm = ldexp(sqrt(wide_squares_##T(x, n, ldexp(1.0, -power))), power);                                \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    INLINED Statistics reduce_##T(const RAW *x, int64_t n, const int count_zeros) {                                    \
        Statistics all = {0, 0, 0, 0, 0};                                                                              \
        INT most = 0;                                                                                                  \
        for (int64_t at = 0; at < n; at += CHUNK) {                                                                    \
            INT bits = add_##T(&all, x + at, n - at < CHUNK ? (int)(n - at) : CHUNK, count_zeros);                     \
            most = bits > most ? bits : most;                                                                          \
        }                                                                                                              \
        finish_##T(&all, x, n, most);                                                                                  \
        return all;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    RARE void measure_##T(const RAW *x, int64_t n, int norms, double *out, int64_t row) {                              \
        Statistics all = {0, 0, NAN, 0, 0};                                                                            \
        if (norms)                                                                                                     \
            all = reduce_##T(x, n, 0);                                                                                 \
        else {                                                                                                         \
            INT most = most_##T(x, n);                                                                                 \
            all.norm = NAN;                                                                                            \
            all.largest = LARGEST_##T(most);                                                                           \
            if (most >= INF_##T)                                                                                       \
                all.nonfinite = nonfinite_##T(x, n);                                                                   \
        }                                                                                                              \
        out[0] = all.norm;                                                                                             \
        out[row] = all.largest;                                                                                        \
        out[2 * row] = all.nonfinite;                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* Adds the non-finite elements of one output to `count`. */                                                       \
    EXPORTED void kernel_sentinel_##T(const RAW *x, int64_t n, double *count) {                                  \
        if (most_##T(x, n) >= INF_##T)                                                                                 \
            *count += nonfinite_##T(x, n);                                                                             \
    }                                                                                                                  \
                                                                                                                       \
    /* Adds one output to its column: squares, largest, zeros, elements, non-finite, each `row` further on. */         \
    EXPORTED void kernel_output_##T(const RAW *x, int64_t n, double *column, int64_t row) {                      \
        Statistics all = reduce_##T(x, n, 1);                                                                          \
        column[0] += all.squares;                                                                                      \
        if (!(all.largest <= column[row]))                                                                             \
            column[row] = isnan(column[row]) ? NAN : all.largest;                                                      \
        column[2 * row] += all.zeros;                                                                                  \
        column[3 * row] += (double)n;                                                                                  \
        column[4 * row] += all.nonfinite;                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    INLINED REAL updates_##T(const RAW *m, const RAW *w, int n, REAL eps, REAL unit) {                                 \
        REAL sum = 0;                                                                                                  \
        for (int i = 0; i < n; i++) {                                                                                  \
            REAL update = MAGNITUDE_##T(m[i]) * unit / (ROOT_##REAL(SIGNED_##T(w[i])) + eps);                          \
            sum += update * update;                                                                                    \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    RARE double wide_updates_##T(const RAW *m, const RAW *w, int n, double eps) {                                      \
        double sum = 0;                                                                                                \
        for (int i = 0; i < n; i++) {                                                                                  \
            double update = WIDE_##T(m[i]) / (sqrt(WIDE_##T(w[i])) + eps);                                             \
            sum += update * update;                                                                                    \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    /* A parameter, its two moments and the update that they amount to, chunk by chunk; `w` is the second moment that  \
     * the update divides by. */                                                                                       \
    RARE void adam_##T(                                                                                                \
        const RAW *p, const RAW *m, const RAW *v, const RAW *w, int64_t n, double eps, double *out, int64_t row) {     \
        Statistics all = {0, 0, 0, 0, 0};                                                                              \
        INT most_p = 0, most_m = 0, most_v = 0;                                                                        \
        double odd_m = 0, odd_v = 0, updates = 0;                                                                      \
        for (int64_t at = 0; at < n; at += CHUNK) {                                                                    \
            int members = n - at < CHUNK ? (int)(n - at) : CHUNK;                                                      \
            INT bits_p = add_##T(&all, p + at, members, 0);                                                            \
            INT bits_m = most_##T(m + at, members), bits_v = most_##T(v + at, members);                                \
            most_p = bits_p > most_p ? bits_p : most_p;                                                                \
            most_m = bits_m > most_m ? bits_m : most_m;                                                                \
            most_v = bits_v > most_v ? bits_v : most_v;                                                                \
            if (bits_m >= INF_##T)                                                                                     \
                odd_m += nonfinite_##T(m + at, members);                                                               \
            if (bits_v >= INF_##T)                                                                                     \
                odd_v += nonfinite_##T(v + at, members);                                                               \
            INT bits_w = w == v ? bits_v : most_##T(w + at, members);                                                  \
            int odd = bits_m >= INF_##T || bits_w >= INF_##T;                                                          \
            int power = odd || !bits_m ? 0 : ilogb(LARGEST_##T(bits_m)); /* squares of tiny moments underflow */       \
            double unit = ldexp(1.0, power > 120 ? -120 : power < -120 ? 120 : -power);                                \
            REAL sum = updates_##T(m + at, w + at, members, (REAL)eps, (REAL)unit);                                    \
            int again = odd ? INF_##T == INF_f16 : !EXACT(sum) && !(sum == 0 && bits_m == 0);                          \
            if (again && sizeof(REAL) == sizeof(float))                                                                \
                updates += wide_updates_##T(m + at, w + at, members, eps);                                             \
            else                                                                                                       \
                updates += sum / (unit * unit);                                                                        \
        }                                                                                                              \
        finish_##T(&all, p, n, most_p);                                                                                \
        out[0] = all.norm;                                                                                             \
        out[row] = all.largest;                                                                                        \
        out[2 * row] = all.nonfinite;                                                                                  \
        out[3 * row] = out[6 * row] = NAN; /* norms of moments: nobody asks */                                         \
        out[4 * row] = LARGEST_##T(most_m);                                                                            \
        out[5 * row] = odd_m;                                                                                          \
        out[7 * row] = LARGEST_##T(most_v);                                                                            \
        out[8 * row] = odd_v;                                                                                          \
        out[9 * row] = sqrt(updates);                                                                                  \
    }

DEFINE(f32, raw32, int32_t, float)
DEFINE(f64, raw64, int64_t, double)
DEFINE(f16, raw16, int32_t, float)
DEFINE(bf16, raw16, int32_t, float)

enum { F32, F64, F16, BF16 };

#define AT(addresses, i) ((const void *)(uintptr_t)(addresses)[i])

/* L2 norm, largest absolute value and non-finite elements of each tensor: three rows of `count`. Without `norms`
 * the first is NaN. */
EXPORTED void kernel_measure(
    int64_t count, const uint64_t *addresses, const int64_t *sizes, const int8_t *dtypes, int64_t norms, double *out) {
    for (int64_t i = 0; i < count; i++) {
        const void *x = AT(addresses, i);
        switch (dtypes[i]) {
        case F32: measure_f32(x, sizes[i], norms != 0, out + i, count); break;
        case F64: measure_f64(x, sizes[i], norms != 0, out + i, count); break;
        case F16: measure_f16(x, sizes[i], norms != 0, out + i, count); break;
        case BF16: measure_bf16(x, sizes[i], norms != 0, out + i, count); break;
        }
    }
}

/* Parameters, first moments, second moments, each as `kernel_measure`, and the L2 norm of Adam's last update
 * without the rate: ten rows of `count`. `addresses` are four rows: parameters, first moments, second moments, and the
 * second moments that updates divide by. `rates` are beta1, beta2 and epsilon. */
EXPORTED void kernel_adam(
    int64_t count, const uint64_t *addresses, const double *steps, const int64_t *sizes, const int8_t *dtypes,
    const double *rates, double *out) {
    double step = -1, root = 1, scale = 1;
    for (int64_t i = 0; i < count; i++) {
        const void *p = AT(addresses, i), *m = AT(addresses, count + i);
        const void *v = AT(addresses, 2 * count + i), *w = AT(addresses, 3 * count + i);
        if (steps[i] != step) { /* nearly always that of the one before */
            step = steps[i];
            root = sqrt(1 - pow(rates[1], step));
            scale = root / (1 - pow(rates[0], step));
        }
        switch (dtypes[i]) {
        case F32: adam_f32(p, m, v, w, sizes[i], rates[2] * root, out + i, count); break;
        case F64: adam_f64(p, m, v, w, sizes[i], rates[2] * root, out + i, count); break;
        case F16: adam_f16(p, m, v, w, sizes[i], rates[2] * root, out + i, count); break;
        case BF16: adam_bf16(p, m, v, w, sizes[i], rates[2] * root, out + i, count); break;
        }
        out[9 * count + i] *= scale;
    }
}

/* Runs every loop once in a process of its own, before the library is loaded into the user's: an instruction that
 * this machine lacks would end it. */
__attribute__((visibility("hidden"))) int main(void) {
    static int64_t memory[CHUNK + 7]; /* zeros of every dtype */
    uint64_t addresses[4] = {(uintptr_t)memory, (uintptr_t)memory, (uintptr_t)memory, (uintptr_t)memory};
    const int64_t size = CHUNK + 7;
    const double step = 1, rates[3] = {0.9, 0.999, 1e-8};
    double out[10], column[5] = {0};
    for (int8_t dtype = F32; dtype <= BF16; dtype++) {
        kernel_measure(1, addresses, &size, &dtype, 1, out);
        kernel_measure(1, addresses, &size, &dtype, 0, out);
        kernel_adam(1, addresses, &step, &size, &dtype, rates, out);
        if (out[0] != 0 || out[9] != 0)
            return 1;
    }
    kernel_sentinel_f32((const raw32 *)memory, size, column);
    kernel_sentinel_f64((const raw64 *)memory, size, column);
    kernel_sentinel_f16((const raw16 *)memory, size, column);
    kernel_sentinel_bf16((const raw16 *)memory, size, column);
    kernel_output_f32((const raw32 *)memory, size, column, 1);
    kernel_output_f64((const raw64 *)memory, size, column, 1);
    kernel_output_f16((const raw16 *)memory, size, column, 1);
    kernel_output_bf16((const raw16 *)memory, size, column, 1);
    if (column[2] != 4.0 * (CHUNK + 7))
        return 1;
    puts("fine");
    return 0;
}
