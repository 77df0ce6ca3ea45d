/* What the machine can do: multiply-adds, reads and copies, on the OpenMP threads of the caller.
 * As in tvm_ops/launcher.c no OpenMP library is linked: a second pool would spin beside torch's. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* One vector register, and enough independent sums to hide the latency of a multiply-add. */
#if defined(__AVX512F__)
#define WIDTH 64
#define SUMS 16
#elif defined(__AVX__)
#define WIDTH 32
#define SUMS 12
#else
#define WIDTH 16
#define SUMS 12
#endif
typedef float Floats __attribute__((vector_size(WIDTH)));
typedef uint64_t Words __attribute__((vector_size(WIDTH)));

typedef void (*OmpParallel)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
typedef void (*Task)(void *arguments, int64_t index);

typedef struct {
  Task task;
  void *arguments;
  int64_t count;
  atomic_long next;
} Job;

static void work(void *data) {
  Job *job = data;
  for (;;) {
    int64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (index >= job->count) return;
    job->task(job->arguments, index);
  }
}

/* Tasks are taken in turn. A null `parallel` or one thread: all on the caller. */
static void run(OmpParallel parallel, int threads, Task task, void *arguments, int64_t count) {
  Job job = {task, arguments, count, 0};
  if (parallel && threads > 1) {
    parallel(work, &job, (unsigned)threads, 0);
  } else {
    work(&job);
  }
}

typedef struct {
  int64_t rounds;
  volatile float sink;
} Multiply;

static void multiply(void *data, int64_t index) {
  Multiply *m = data;
  Floats sums[SUMS], factor, term;
  (void)index;
  for (unsigned i = 0; i < WIDTH / sizeof(float); i++) factor[i] = 0.999f, term[i] = 0.001f;
  for (int s = 0; s < SUMS; s++) sums[s] = term * (float)s;
  for (int64_t r = 0; r < m->rounds; r++) {
#pragma GCC unroll 16
    for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * factor + term;
  }
  float total = 0;
  for (int s = 0; s < SUMS; s++) total += sums[s][0];
  m->sink = total;
}

/* Floating-point operations done: `rounds` of SUMS vector multiply-adds on each thread. */
int64_t machine_multiply(OmpParallel parallel, int threads, int64_t rounds) {
  Multiply m = {rounds, 0};
  run(parallel, threads, multiply, &m, threads);
  return rounds * threads * SUMS * 2 * (int64_t)(WIDTH / sizeof(float));
}

typedef struct {
  char *to;
  const char *from;
  int64_t size, passes;
  atomic_ullong sink;
} Span;

static void read_span(void *data, int64_t index) {
  Span *span = data;
  const Words *words = (const Words *)(span->from + index * span->size);
  Words sums[8] = {0};
  for (int64_t pass = 0; pass < span->passes; pass++) {
    for (int64_t i = 0; i < span->size / WIDTH; i += 8) {
#pragma GCC unroll 8
      for (int s = 0; s < 8; s++) sums[s] += words[i + s];
    }
    __asm__ volatile("" ::: "memory"); /* the next pass reads again */
  }
  for (int s = 1; s < 8; s++) sums[0] += sums[s];
  atomic_fetch_add(&span->sink, sums[0][0]);
}

/* Each thread reads its own `size` bytes (a multiple of 512) of `from`, `passes` times. */
void machine_read(OmpParallel parallel, int threads, const char *from, int64_t size,
                  int64_t passes) {
  Span span = {0, from, size, passes, 0};
  run(parallel, threads, read_span, &span, threads);
}

static void copy_span(void *data, int64_t index) {
  Span *span = data;
  memcpy(span->to + index * span->size, span->from + index * span->size, (size_t)span->size);
}

/* Each thread copies its own `size` bytes. */
void machine_copy(OmpParallel parallel, int threads, char *to, const char *from, int64_t size) {
  Span span = {to, from, size, 1, 0};
  run(parallel, threads, copy_span, &span, threads);
}

/* `groups` times, `group_stride` bytes apart, `count` pieces of `size` bytes, `stride` bytes apart;
 * offsets into a base, the same strides at both ends. */
typedef struct {
  int64_t from, to, groups, group_stride, count, stride, size;
} Pieces;

typedef struct {
  char *const *bases;
  const Pieces *pieces;
  int64_t num_pieces;
  int call;
} Scattered;

static void copy_pieces(void *data, int64_t index) {
  const Scattered *all = data;
  char *base = all->bases[index];
  /* The C library's memcpy, through a pointer that the compiler can't look behind. */
  void *(*volatile pointer)(void *, const void *, size_t) = memcpy;
  void *(*function)(void *, const void *, size_t) = pointer;
  for (int64_t p = 0; p < all->num_pieces; p++) {
    const Pieces piece = all->pieces[p];
    for (int64_t g = 0; g < piece.groups; g++) {
      const char *from = base + piece.from + g * piece.group_stride;
      char *to = base + piece.to + g * piece.group_stride;
      if (piece.size == 2 && !all->call) { /* constant sizes become a load and a store, no call */
        for (int64_t i = 0; i < piece.count; i++)
          memcpy(to + i * piece.stride, from + i * piece.stride, 2);
      } else if (piece.size == 4 && !all->call) {
        for (int64_t i = 0; i < piece.count; i++)
          memcpy(to + i * piece.stride, from + i * piece.stride, 4);
      } else {
        for (int64_t i = 0; i < piece.count; i++)
          function(to + i * piece.stride, from + i * piece.stride, (size_t)piece.size);
      }
    }
  }
}

/* Copy all `pieces` within each of `bases`, in order; the bases share the threads. `call`: let no
 * memcpy be inlined. */
void machine_copy_pieces(OmpParallel parallel, int threads, char *const *bases, int64_t num_bases,
                         const Pieces *pieces, int64_t num_pieces, int call) {
  Scattered all = {bases, pieces, num_pieces, call};
  run(parallel, threads, copy_pieces, &all, num_bases);
}
