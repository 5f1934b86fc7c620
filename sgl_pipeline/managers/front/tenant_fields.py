"""The tenant of a message (`entrance/request_tenant.py` writes it)."""

from dataclasses import dataclass

from sgl_pipeline.args.tenant_flags import MAX_TENANT_NAME_LENGTH
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage

# The tenant of all requests that present no name.
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class TenantFields:
    """`by` is the value of `--fair-shares-by`; None: all requests are of one tenant."""

    by: str | None = None

    def tenant(self, message: GenerateMessage) -> str:
        """`Request.tenant`. Raises RequestError (400) for a name that is too long."""
        if self.by is None:
            return ""
        name = message.routing_key or ANONYMOUS
        if len(name) > MAX_TENANT_NAME_LENGTH:
            raise RequestError(
                f"the tenant's name ({self.by}) may have {MAX_TENANT_NAME_LENGTH} characters, got "
                f"{len(name)}"
            )
        return name
