// The threads that share the work of a kernel.
//
// Included by whatever has work to share. Knows nothing of the work.

#pragma once

#include <omp.h>

namespace {

// Calls body() on each thread of a team: of the one that the caller is of, or of a new one of
// `num_threads`. The work that `body` shares is the team's; the last of it must be waited for by all.
template <typename Body>
void in_team(int num_threads, const Body& body) {
  if (omp_in_parallel()) {
    body();
  } else {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    body();
  }
}

}  // namespace
