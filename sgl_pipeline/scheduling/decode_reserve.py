"""Pages that running decodes are expected to need, an estimate corrected by each retraction.

The policy `throttle-adaptive` keeps this number of pages from prefill. The estimate changes with
steps and retractions only, never with how often it is read, so that runtime and simulator agree.

After gLLM's code of 2026 (`Scheduler._decode_reserve_pages`) and the tracker of SGLang that it
follows. They round each request up to pages and take off what its last page still holds, which on
average cancel; the sum here does neither, and so needs no walk over the requests.
"""

# In thousandths, because the ratio is only ever added to: no rounding error gathers.
FIRST_RATIO = 700
LOWEST_RATIO = 100
HIGHEST_RATIO = 1000
RISE_ON_SHORTAGE = 50
FALL_PER_STEP = 2


class DecodeReserve:
    """`ratio` thousandths of the output that running decodes may still draw will be drawn."""

    def __init__(self, page_size: int, pipeline_depth: int) -> None:
        self._page_size = page_size
        self.pipeline_depth = pipeline_depth
        self._num_shortages = 0
        self.ratio = FIRST_RATIO

    def pages(self, remaining_output_tokens: int) -> int:
        """Pages for that share of the tokens, but at least one for each step in flight."""
        tokens = remaining_output_tokens * self.ratio
        return max(self.pipeline_depth, -(-tokens // (1000 * self._page_size)))

    def note_step(self, num_shortages: int) -> None:
        """A step was decided; `num_shortages` counts the retractions so far for lack of pages."""
        if num_shortages > self._num_shortages:
            self.ratio = min(HIGHEST_RATIO, self.ratio + RISE_ON_SHORTAGE)
            self._num_shortages = num_shortages
        self.ratio = max(LOWEST_RATIO, self.ratio - FALL_PER_STEP)
