"""Prefill and decode on servers of their own."""

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_pipeline.args.checks import at_least, between, one_of, require
from sgl_pipeline.args.flags import check_flags, flags_of, our_flag, upstream_flag, without_flag

Mode = Literal["null", "prefill", "decode"]
DISAGGREGATION_MODES: tuple[Mode, ...] = get_args(Mode)
PAGE_LINK = "page_link"
_MODE = "--disaggregation-mode"
_FALLBACK = "--disaggregation-decode-fallback"
_OFFLOAD = "--enable-attention-offload"
_RATIO = "--attention-offload-ratio"
_AUTO = "auto"


def _require_page_link(flag: str, value: str) -> None:
    require(
        value == PAGE_LINK,
        f"{flag} {value} is not built: pages go over encrypted TCP streams, from stage to stage; "
        f"leave the flag out, or give {PAGE_LINK}",
    )


def _require_ratio(flag: str, value: str) -> None:
    try:
        is_ratio = value == _AUTO or float(value) >= 0.0
    except ValueError:
        is_ratio = False
    require(is_ratio, f"{flag} {value} is neither {_AUTO} nor a number from 0 to inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationArgs:
    """The role of this server where prefill and decode are apart, by SGLang's flags and variables.

    `mode` "null": it does both. A prefill server listens at `bootstrap_port`; a decode server dials
    that port of a request that names none. `reserved_decode_tokens` are kept free on the decode
    server for each request that decodes or is on its way. With `decode_fallback` the decode server
    computes a prompt itself where its prefill server fails. A prefill server keeps the pages of a
    request for `bootstrap_timeout_s` until a decode server asks for them, and a decode server waits
    as long until they are computed; they may take `waiting_timeout_s` to cross. A peer is lost
    that says nothing for `silence_s`. `failure_probability` is that of a room, for tests.

    With `attention_offload` a prefill server lends pages, and a decode server leaves the attention
    of some requests to those that do: up to `attention_offload_ratio` of its own, in tokens.
    """

    mode: Mode = upstream_flag("null", _MODE, check=one_of(DISAGGREGATION_MODES))
    transfer_backend: str = upstream_flag(
        PAGE_LINK, "--disaggregation-transfer-backend", check=_require_page_link
    )
    bootstrap_port: int = upstream_flag(
        8998, "--disaggregation-bootstrap-port", check=between(1, 65535)
    )
    reserved_decode_tokens: int = upstream_flag(
        512, "--num-reserved-decode-tokens", check=at_least(0)
    )
    decode_fallback: bool = our_flag(
        False,
        _FALLBACK,
        help="With --disaggregation-mode decode, prompts are computed here where their prefill "
        "server fails, or does not answer in time.",
    )
    attention_offload: bool = our_flag(
        False,
        _OFFLOAD,
        help="A prefill server lends pages to decode servers and computes attention over them; a "
        "decode server leaves the attention of some requests there. Both need it.",
    )
    attention_offload_ratio: str = our_flag(
        _AUTO,
        _RATIO,
        help="With --disaggregation-mode decode, the most tokens whose attention is offloaded, as "
        "a ratio to those attended to here: a number, inf (all that can be), or auto, by the "
        "measured rates and only where steps do not wait for it.",
        check=_require_ratio,
    )
    bootstrap_timeout_s: float = without_flag(
        300.0, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT sets it"
    )
    waiting_timeout_s: float = without_flag(300.0, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets it")
    silence_s: float = without_flag(4.0, "SGLANG_DISAGGREGATION_HEARTBEAT_* set it")
    failure_probability: float = without_flag(0.0, "SGLANG_TEST_DISAGG_FAILURE_PROB sets it")

    @property
    def is_on(self) -> bool:
        """True if this server does only one of the two."""
        return self.mode != "null"

    @property
    def offload_ratio(self) -> float | None:
        """The ratio as a number; None: by what is measured."""
        ratio = self.attention_offload_ratio
        return None if ratio == _AUTO else float(ratio)

    @property
    def engine_type(self) -> str:
        """SGLang's name of the role in metrics."""
        return self.mode if self.is_on else "unified"

    def __post_init__(self) -> None:
        check_flags(self)
        if not self.is_on:
            for one, flag in flags_of(self):
                require(
                    getattr(self, one.name) == one.default,
                    f"{flag.names[0]} does nothing without {_MODE}",
                )
        require(
            self.mode == "decode" or not self.decode_fallback,
            f"{_FALLBACK} is for {_MODE} decode, this is {self.mode}",
        )
        is_default = self.attention_offload_ratio == _AUTO
        require(
            is_default or self.mode == "decode",
            f"{_RATIO} is for {_MODE} decode, this is {self.mode}",
        )
        require(is_default or self.attention_offload, f"{_RATIO} does nothing without {_OFFLOAD}")
