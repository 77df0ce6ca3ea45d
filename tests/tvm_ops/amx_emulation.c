/* Intel AMX in software, per thread, as the SDM defines it: what would raise #UD ends the process
 * with a message. Kernels compiled for the tests call these functions in place of instructions. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES 8
#define MAX_ROWS 16
#define MAX_BYTES 64
#define DEPTH 16 /* pairs */

typedef struct {
  uint8_t palette;
  uint8_t rows[TILES];
  uint16_t bytes[TILES];
  _Alignas(64) uint8_t data[TILES][MAX_ROWS][MAX_BYTES];
} State;

static _Thread_local State state;
/* Threads with a tile configuration; and how often each instruction ran. */
static atomic_long configured, counts[6];
enum { LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS };

static void check(int ok, const char *message) {
  if (ok) return;
  fprintf(stderr, "AMX emulation: %s\n", message);
  abort();
}

static void count(int instruction) {
  atomic_fetch_add_explicit(&counts[instruction], 1, memory_order_relaxed);
}

long emulated_configured(void) { return atomic_load(&configured); }

/* Read and reset the count of an instruction, by its place in the enum above. */
long emulated_count(int instruction) { return atomic_exchange(&counts[instruction], 0); }

static void check_tile(int8_t tile) {
  check(state.palette == 1, "no tile configuration is loaded");
  check(tile >= 0 && tile < TILES, "no such tile register");
  check(state.rows[tile] && state.bytes[tile], "a tile that is not configured");
}

void emulated_ldtilecfg(const uint8_t *config) {
  static const uint8_t zeros[16];
  count(LDTILECFG);
  check(config[0] == 1 && config[1] == 0, "palette or start row");
  check(!memcmp(config + 2, zeros, 14), "reserved bytes 2 to 15 are not 0");
  check(!memcmp(config + 32, zeros, 16), "row bytes of tiles 8 to 15 are not 0");
  check(!memcmp(config + 56, zeros, 8), "rows of tiles 8 to 15 are not 0");
  if (!state.palette) atomic_fetch_add(&configured, 1);
  memset(&state, 0, sizeof state);
  state.palette = 1;
  memcpy(state.bytes, config + 16, sizeof state.bytes);
  memcpy(state.rows, config + 48, sizeof state.rows);
  for (int t = 0; t < TILES; t++) {
    check(state.rows[t] <= MAX_ROWS && state.bytes[t] <= MAX_BYTES, "a tile is too large");
    check(!state.rows[t] == !state.bytes[t], "a tile has rows but no bytes, or bytes but no rows");
  }
}

void emulated_tilerelease(void) {
  count(TILERELEASE);
  check(state.palette == 1, "released without a tile configuration");
  atomic_fetch_sub(&configured, 1);
  memset(&state, 0, sizeof state);
}

void emulated_tilezero(int8_t tile) {
  count(TILEZERO);
  check_tile(tile);
  memset(state.data[tile], 0, sizeof state.data[tile]);
}

void emulated_tileloadd64(int8_t tile, const uint8_t *from, int64_t stride) {
  count(TILELOADD);
  check_tile(tile);
  memset(state.data[tile], 0, sizeof state.data[tile]);
  for (int r = 0; r < state.rows[tile]; r++) {
    memcpy(state.data[tile][r], from + r * stride, state.bytes[tile]);
  }
}

void emulated_tilestored64(int8_t tile, uint8_t *to, int64_t stride) {
  count(TILESTORED);
  check_tile(tile);
  for (int r = 0; r < state.rows[tile]; r++) {
    memcpy(to + r * stride, state.data[tile][r], state.bytes[tile]);
  }
}

/* Denormal numbers count as zero, as operands and as results. */
static inline float flush(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (!(bits & 0x7F800000)) bits &= 0x80000000;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float bfloat(uint32_t bits) {
  float value;
  bits <<= 16;
  memcpy(&value, &bits, 4);
  return flush(value);
}

void emulated_tdpbf16ps(int8_t sum, int8_t left, int8_t right) {
  count(TDPBF16PS);
  check_tile(sum), check_tile(left), check_tile(right);
  check(sum != left && sum != right && left != right, "operands are not distinct");
  check(state.rows[sum] == state.rows[left], "rows of sums and left operand differ");
  check(state.bytes[sum] == state.bytes[right], "columns of sums and right operand differ");
  check(state.bytes[left] == 4 * state.rows[right], "depths of left and right operand differ");
  check(state.bytes[left] % 4 == 0 && state.bytes[right] % 4 == 0, "row bytes");
  int depth = state.bytes[left] / 4, columns = state.bytes[right] / 4;
  float low[DEPTH][DEPTH], high[DEPTH][DEPTH];
  for (int k = 0; k < depth; k++) {
    for (int n = 0; n < columns; n++) {
      uint32_t word;
      memcpy(&word, &state.data[right][k][4 * n], 4);
      low[k][n] = bfloat(word & 0xFFFF);
      high[k][n] = bfloat(word >> 16);
    }
  }
  for (int m = 0; m < state.rows[sum]; m++) {
    float evens[DEPTH] = {0}, odds[DEPTH] = {0};
    for (int k = 0; k < depth; k++) {
      uint32_t word;
      memcpy(&word, &state.data[left][m][4 * k], 4);
      float even = bfloat(word & 0xFFFF), odd = bfloat(word >> 16);
      for (int n = 0; n < columns; n++) {
        evens[n] = flush(__builtin_fmaf(even, low[k][n], evens[n]));
        odds[n] = flush(__builtin_fmaf(odd, high[k][n], odds[n]));
      }
    }
    for (int n = 0; n < columns; n++) {
      float before;
      memcpy(&before, &state.data[sum][m][4 * n], 4);
      float after = flush(before + flush(evens[n] + odds[n]));
      memcpy(&state.data[sum][m][4 * n], &after, 4);
    }
  }
}
