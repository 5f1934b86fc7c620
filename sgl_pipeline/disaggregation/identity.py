"""The facts that both servers of a pair must share, and remedies where they do not."""

from dataclasses import dataclass

from sgl_pipeline.disaggregation.room_messages import VERSION, PeerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """A server: its `name` for messages, and what gives the same tokens the same bytes in a page.
    `digest` is of model, weights and all the rest (`kv_store/object_names.py`)."""

    name: str
    digest: str
    page_size: int
    num_layers: int
    kv_dtype: str

    def hello(self) -> PeerHello:
        """The first message of this server as one that decodes."""
        return PeerHello(
            version=VERSION,
            digest=self.digest,
            page_size=self.page_size,
            num_layers=self.num_layers,
            kv_dtype=self.kv_dtype,
            name=self.name,
        )

    def refusal(self, hello: PeerHello) -> str | None:
        """Says why this prefill server cannot compute prompts for the one that said `hello`, with
        both values and what to do; None if it can."""
        for what, theirs, ours, remedy in (
            ("version", hello.version, VERSION, "install the same sgl_pipeline on both"),
            ("page size", hello.page_size, self.page_size, "give both the same --page-size"),
            ("layers", hello.num_layers, self.num_layers, "give both the same --model-path"),
            ("KV dtype", hello.kv_dtype, self.kv_dtype, "give both the same --kv-cache-dtype"),
            ("digest", hello.digest, self.digest, "give both the same model, weights and dtype"),
        ):
            if theirs != ours:
                return (
                    f"{what} {theirs} of the decode server {hello.name} is not {ours}, that of "
                    f"the prefill server {self.name}; {remedy}"
                )
        return None
