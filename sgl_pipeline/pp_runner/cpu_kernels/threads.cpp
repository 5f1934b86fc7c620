// Where the threads run that compute the products and all else that is shared by several.
//
// Called from library.py through ctypes, on the thread that the kernels will be called from.

#include <omp.h>
#include <sched.h>

// Keeps each of the `num_threads` threads on a core of its own, this one on the first of `cores`.
// Returns how many could not be.
extern "C" int sglp_bind_threads(int num_threads, const int* cores) {
  int failed = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : failed)
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cores[omp_get_thread_num()], &own);
    failed += sched_setaffinity(0, sizeof(own), &own) != 0;
  }
  return failed;
}
