"""The plans of a stage's pipeline, of which a step's epoch selects one."""

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.stage_plan import StagePlan


class KnownPlans:
    """All plans since the first one."""

    def __init__(self, first: StagePlan) -> None:
        self._plans = {first.epoch: first}

    @property
    def newest(self) -> StagePlan:
        return self._plans[max(self._plans)]

    def check(self, plan: StagePlan) -> None:
        """Raises ProtocolError when the epoch of `plan` is not newer than all known ones, or when
        it is not of this pipeline."""
        newest = self.newest
        if plan.epoch <= newest.epoch:
            raise ProtocolError(
                f"a plan of epoch {plan.epoch} arrived, this stage knows that of {newest.epoch}"
            )
        if (plan.num_stages, plan.num_layers) != (newest.num_stages, newest.num_layers):
            raise ProtocolError(
                f"the plan of epoch {plan.epoch} has {plan.num_layers} layers in {plan.num_stages} "
                f"stages, this pipeline has {newest.num_layers} in {newest.num_stages}"
            )

    def add(self, plan: StagePlan) -> None:
        """Knows a plan that was checked."""
        self._plans[plan.epoch] = plan

    def of(self, step_id: int, epoch: int) -> StagePlan:
        """The plan of a step. Raises ProtocolError when its epoch is not known."""
        plan = self._plans.get(epoch)
        if plan is None:
            known = ", ".join(map(str, sorted(self._plans)))
            raise ProtocolError(
                f"step {step_id} is of epoch {epoch}, this stage knows the plans of epochs {known}"
            )
        return plan
