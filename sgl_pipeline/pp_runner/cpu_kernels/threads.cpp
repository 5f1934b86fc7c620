// Binds the threads that share a kernel's work to cores. The thread that calls the kernels calls this.

#include <omp.h>
#include <sched.h>

#include "exports.h"

// Keeps each of the `num_threads` threads on one of `cores`, the calling one on the first, or where
// their number is another, each on all of them. Returns how many the system refused to keep there.
extern "C" int sglp_bind_threads(int num_threads, int num_cores, const int* cores) {
  int refused = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : refused)
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    for (int index = 0; index < num_cores; ++index)
      if (index == omp_get_thread_num() || num_cores != num_threads) CPU_SET(cores[index], &own);
    refused += sched_setaffinity(0, sizeof(own), &own) != 0;
  }
  return refused;
}
