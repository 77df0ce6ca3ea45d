// Runs CUDA source on a CPU: found by the generated code's #include <cuda.h> in place of NVIDIA's.
//
// Threads of a block are fibres of one thread, switched at barriers only: the run is deterministic,
// and emulation_order() turns the order in which they run around, so that a missing barrier shows
// as a wrong result. Warp instructions meet at a barrier of their warp's 32 lanes.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __restrict__
// TVM writes alignas after __shared__, where only an attribute is allowed behind `static`.
#define __shared__ static
#define alignas(n) __attribute__((aligned(n)))

using std::max;
using std::min;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef void* cudaStream_t;
inline int cudaGetLastError() { return 0; }

namespace emulation {
enum State { kRunning, kAtBlock, kAtWarp, kDone };
struct Fibre {
  ucontext_t context;
  State state;
  int warp_site;
};
inline dim3 block, grid;
inline std::vector<Fibre> fibres;
inline std::vector<char> stacks;
inline ucontext_t scheduler;
inline unsigned current;
inline bool backwards = false;
inline std::function<void()> body;
inline int votes, vote_result;
struct Lane {
  uint32_t in[4], out[4];
  float fin[4], fout[4];
  uint32_t address;
};
inline std::vector<Lane> lanes;
constexpr size_t kStack = 128 * 1024;
// Copies that cp.async has begun and nobody has waited for: done late, as late as is allowed.
struct Copy {
  uint32_t to;
  unsigned char bytes[16];
};
inline std::vector<std::vector<std::vector<Copy>>> copies;  // [thread][group]

inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}
inline void yield(State state) {
  Fibre& me = fibres[current];
  me.state = state;
  swapcontext(&me.context, &scheduler);
}
inline void entry() {
  body();
  yield(kDone);
}
inline void run_block(unsigned threads) {
  fibres.resize(threads);
  stacks.resize(kStack * threads);
  lanes.assign(threads, Lane());
  copies.assign(threads, std::vector<std::vector<Copy>>(1));
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&fibres[i].context);
    fibres[i].context.uc_stack.ss_sp = stacks.data() + kStack * i;
    fibres[i].context.uc_stack.ss_size = kStack;
    fibres[i].context.uc_link = &scheduler;
    fibres[i].state = kRunning;
    makecontext(&fibres[i].context, entry, 0);
  }
  while (true) {
    for (unsigned n = 0; n < threads; n++) {
      unsigned i = backwards ? threads - 1 - n : n;
      if (fibres[i].state == kRunning) {
        current = i;
        swapcontext(&scheduler, &fibres[i].context);
      }
    }
    unsigned done = 0, waiting = 0, moved = 0;
    for (unsigned w = 0; w < threads; w += 32) {
      unsigned size = std::min(32u, threads - w), there = 0;
      for (unsigned i = w; i < w + size; i++) there += fibres[i].state == kAtWarp;
      if (there == size) {
        for (unsigned i = w; i < w + size; i++) fibres[i].state = kRunning;
        moved = 1;
      }
    }
    for (auto& f : fibres) done += f.state == kDone, waiting += f.state == kAtBlock;
    if (done == threads) return;
    if (waiting == threads) {
      vote_result = votes;
      votes = 0;
      for (auto& f : fibres) f.state = kRunning;
    } else if (!moved) {
      fail("some threads wait at a barrier that others never reach");
    }
  }
}
inline void launch(dim3 g, unsigned threads, std::function<void()> f) {
  body = f;
  grid = g;
  for (unsigned z = 0; z < g.z; z++)
    for (unsigned y = 0; y < g.y; y++)
      for (unsigned x = 0; x < g.x; x++) {
        block = dim3(x, y, z);
        run_block(threads);
      }
}
inline void warp() { yield(kAtWarp); }
inline Lane& lane(unsigned i) { return lanes[current / 32 * 32 + i]; }
inline Lane& mine() { return lanes[current]; }
inline unsigned my_lane() { return current % 32; }
extern "C" inline void* from_shared(uint32_t address);
}  // namespace emulation

struct EmulatedThread {
  operator dim3() const { return dim3(emulation::current, 0, 0); }
};
#define threadIdx (dim3(emulation::current, 0, 0))
#define blockIdx (emulation::block)
inline void __syncthreads() { emulation::yield(emulation::kAtBlock); }
inline int __syncthreads_or(int bad) {
  emulation::votes |= bad;
  emulation::yield(emulation::kAtBlock);
  return emulation::vote_result;
}
inline void __syncwarp() { emulation::warp(); }

// Shared addresses are 32-bit distances from an anchor in the same library's memory.
inline char emulation_anchor;
inline uint32_t __cvta_generic_to_shared(const void* p) {
  return (uint32_t)((const char*)p - &emulation_anchor);
}
inline void* emulation::from_shared(uint32_t address) {
  return &emulation_anchor + (int32_t)address;
}

inline float half_to_float(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp((float)mantissa, -24)
                                : std::ldexp((float)(mantissa + 1024), exponent - 25);
  return bits & 0x8000 ? -value : value;
}
inline uint16_t float_to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (size != size) return 0x7fff;
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);
  exponent = std::max(exponent, -13);
  long steps = std::lrint(std::ldexp(size, 11 - exponent));  // to nearest even
  return sign | (uint16_t)(((exponent + 13) << 10) + steps);
}
inline float bfloat_to_float(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline uint16_t float_to_bfloat(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (value != value) return 0x7fff;
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

template <float (*decode)(uint16_t)>
void emulated_mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,
                  uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1,
                  float c2, float c3) {
  using namespace emulation;
  Lane& me = mine();
  uint32_t a[4] = {a0, a1, a2, a3};
  std::memcpy(me.in, a, sizeof a);
  me.out[0] = b0, me.out[1] = b1;
  warp();
  unsigned g = my_lane() / 4, t = my_lane() % 4;
  float sums[4] = {c0, c1, c2, c3};
  for (int e = 0; e < 4; e++) {
    unsigned row = g + e / 2 * 8, column = 2 * t + e % 2;
    for (unsigned k = 0; k < 16; k++) {
      uint32_t left = lane(row % 8 * 4 + k % 8 / 2).in[row / 8 + k / 8 * 2];
      uint32_t right = lane(column * 4 + k % 8 / 2).out[k / 8];
      sums[e] += decode(left >> k % 2 * 16) * decode(right >> k % 2 * 16);
    }
  }
  warp();
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32 \
  emulated_mma<half_to_float>
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32 \
  emulated_mma<bfloat_to_float>

template <bool transposed>
void emulated_ldmatrix(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  using namespace emulation;
  if (address % 4) fail("ldmatrix reads an address that is no word's");
  mine().address = address;
  warp();
  uint32_t* out[4] = {&r0, &r1, &r2, &r3};
  unsigned g = my_lane() / 4, t = my_lane() % 4;
  for (unsigned m = 0; m < 4; m++) {
    uint16_t pair[2];
    for (unsigned e = 0; e < 2; e++) {
      unsigned row = transposed ? 2 * t + e : g, column = transposed ? g : 2 * t + e;
      pair[e] = ((const uint16_t*)from_shared(lane(m * 8 + row).address))[column];
    }
    std::memcpy(out[m], pair, 4);
  }
  warp();
}
#define tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16 emulated_ldmatrix<false>
#define tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16 emulated_ldmatrix<true>

template <bool indexed>
void emulated_shuffle(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, uint32_t members) {
  using namespace emulation;
  if (c != 31 || members != 0xffffffffu) fail("shuffle with segments or absent lanes");
  mine().in[0] = a;
  warp();
  d = lane(indexed ? b % 32 : my_lane() ^ b).in[0];
  warp();
}
#define tvm_builtin_ptx_shfl_sync_bfly_b32 emulated_shuffle<false>
#define tvm_builtin_ptx_shfl_sync_idx_b32 emulated_shuffle<true>

template <uint16_t (*encode)(float)>
void emulated_pack(uint32_t& d, float high, float low) {
  d = (uint32_t)encode(high) << 16 | encode(low);
}
#define tvm_builtin_ptx_cvt_f16x2_f32_rn_f16x2_f32 emulated_pack<float_to_half>
#define tvm_builtin_ptx_cvt_bf16x2_f32_rn_bf16x2_f32 emulated_pack<float_to_bfloat>

inline void emulated_copy16(uint32_t to, const void* from) {
  using namespace emulation;
  if ((uintptr_t)from % 16 || (uintptr_t)from_shared(to) % 16) fail("cp.async is misaligned");
  Copy copy{to, {}};
  std::memcpy(copy.bytes, from, 16);
  copies[current].back().push_back(copy);
  std::memset(from_shared(to), 0xff, 16);  // NaN until somebody waits for it
}
inline void emulated_commit() { emulation::copies[emulation::current].emplace_back(); }
template <unsigned pending>
void emulated_wait() {
  auto& groups = emulation::copies[emulation::current];
  while (groups.size() > pending + 1) {
    for (auto& c : groups.front()) std::memcpy(emulation::from_shared(c.to), c.bytes, 16);
    groups.erase(groups.begin());
  }
}
#define tvm_builtin_ptx_cp_async_cg_async_cg_shared_global_L2__128B_16 emulated_copy16
#define tvm_builtin_ptx_cp_async_commit_group_async_commit_group emulated_commit
#define tvm_builtin_ptx_cp_async_wait_group_async_wait_group_1 emulated_wait<1>
#define tvm_builtin_cuda_cvta_generic_to_shared __cvta_generic_to_shared
#define tvm_builtin_cuda_syncthreads_or __syncthreads_or
