/* Runs the parallel loops of TVM kernels on the OpenMP pool that the process already owns, and
 * gives them scratch memory. No OpenMP library is linked: the caller binds the functions of the
 * loaded one, so that no second pool appears. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define TASKS_PER_THREAD 4
#define MIN_TASKS 64
#define SLOTS 32
#define ALIGNMENT 64

typedef struct {
  void *sync_handle;
  int32_t num_task;
} ParallelEnv;

typedef int (*Body)(int task, ParallelEnv *env, void *closure);
typedef void (*OmpParallel)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);

static OmpParallel omp_parallel;
static int (*omp_max_threads)(void);
static int (*omp_inside)(void);
static void (*raise_error)(const char *kind, const char *message);

typedef struct {
  Body body;
  void *closure;
  ParallelEnv env;
  atomic_int next;
  atomic_int failed;
} Job;

/* Null OpenMP functions mean: run everything on the calling thread. */
void tvm_ops_bind(void *parallel, void *max_threads, void *inside, void *raise) {
  omp_parallel = (OmpParallel)parallel;
  omp_max_threads = (int (*)(void))max_threads;
  omp_inside = (int (*)(void))inside;
  raise_error = (void (*)(const char *, const char *))raise;
}

static void work(void *data) {
  Job *job = data;
  for (;;) {
    int task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (task >= job->env.num_task || atomic_load(&job->failed)) return;
    if (job->body(task, &job->env, job->closure) != 0) atomic_store(&job->failed, 1);
  }
}

/* Contract of TVMBackendParallelLaunch: 0, or -1 with an error raised on the calling thread. More
 * tasks than threads, taken in turn, even out items of different length. */
int tvm_ops_parallel_launch(Body body, void *closure, int num_task) {
  int threads = omp_parallel && !omp_inside() ? omp_max_threads() : 1;
  int tasks = threads == 1 ? 1 : threads * TASKS_PER_THREAD;
  if (threads > 1 && tasks < MIN_TASKS) tasks = MIN_TASKS;
  Job job = {body, closure, {0, num_task > 0 ? num_task : tasks}, 0, 0};
  if (threads == 1) {
    work(&job);
  } else {
    omp_parallel(work, &job, 0, 0);
  }
  if (!atomic_load(&job.failed)) return 0;
  /* The failing task may have raised its error on another thread, where the caller can't see it. */
  raise_error("RuntimeError", "a parallel task of a TVM kernel failed (out of memory?)");
  return -1;
}

/* Scratch blocks are kept per thread: a kernel asks for the same few sizes at every call. */
typedef struct {
  void *data;
  uint64_t size;
  int used;
} Slot;

static _Thread_local Slot slots[SLOTS];

void *tvm_ops_alloc(int device, int device_id, uint64_t size, int type_code, int type_bits) {
  Slot *best = NULL;
  (void)device, (void)device_id, (void)type_code, (void)type_bits;
  /* Null means failure, so even an empty block has an address. */
  size = size ? (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : ALIGNMENT;
  for (int i = 0; i < SLOTS; i++) {
    if (slots[i].used) continue;
    if (slots[i].size == size) {
      slots[i].used = 1;
      return slots[i].data;
    }
    if (!best || slots[i].size < best->size) best = &slots[i];
  }
  if (!best) return NULL;
  free(best->data);
  best->data = aligned_alloc(ALIGNMENT, size);
  best->size = best->data ? size : 0;
  best->used = best->data != NULL;
  return best->data;
}

int tvm_ops_free(int device, int device_id, void *data) {
  (void)device, (void)device_id;
  for (int i = 0; i < SLOTS; i++) {
    if (slots[i].used && slots[i].data == data) {
      slots[i].used = 0;
      return 0;
    }
  }
  return -1;
}
