"""What the sessions of a fake stage with stores and peers have in common."""

from abc import ABC, abstractmethod

from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer


class FakeSession(ABC):
    """The time from a `UseStore` to the next interrupt: when it `is_over`, it touches the pages of
    the stage no more, though what it was writing to a store may still get there."""

    def __init__(self, layers: range) -> None:
        self.layers = layers
        self.is_over = False

    @abstractmethod
    def add(self, job: PageTransfer) -> None:
        """Carries out `job` when its turn comes."""
