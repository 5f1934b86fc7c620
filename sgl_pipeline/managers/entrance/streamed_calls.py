"""Makes streamed tool calls independent of the number of tokens in a chunk.

Upstream's detectors of tool calls are written for a token at a time: of a chunk that holds the end
of a text and the start of a call, or two calls, they drop a part. Chunks of several tokens are
usual: `--stream-interval`, a stop string that was waited for, or a front that lags behind the
stages.
"""

import re

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser

# Detectors look for marks in angle brackets or `[CAPITALS]`, and for the braces of JSON: each is a
# piece, and so is what lies between two. Smaller ones cost more, because a detector parses all of a
# call again for each.
_PIECE = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|[^<>\[\]{}]+|.", re.DOTALL)


def read_calls_piece_by_piece() -> None:
    """Puts a detector that reads small pieces in the place of each of upstream's; idempotent."""
    detectors = FunctionCallParser.ToolCallParserEnum
    for name, detector in detectors.items():
        if not issubclass(detector, _PieceByPiece):
            detectors[name] = _reading_pieces(detector)


class _PieceByPiece(BaseFormatDetector):
    """Mixin before a detector of upstream's: gives it a chunk in pieces and joins its results."""

    def parse_streaming_increment(self, new_text: str, tools: list[Tool]) -> StreamingParseResult:
        read = super().parse_streaming_increment
        pieces = _PIECE.findall(new_text)
        if len(pieces) < 2:
            return read(new_text, tools)
        results = [read(piece, tools) for piece in pieces]
        return StreamingParseResult(
            normal_text="".join(result.normal_text for result in results),
            calls=_joined([call for result in results for call in result.calls]),
        )


def _reading_pieces(detector: type[BaseFormatDetector]) -> type[BaseFormatDetector]:
    return type(detector.__name__, (_PieceByPiece, detector), {"__doc__": detector.__doc__})


def _joined(items: list[ToolCallItem]) -> list[ToolCallItem]:
    """`items` with the successive parts of one call's arguments as one."""
    joined: list[ToolCallItem] = []
    for item in items:
        last = joined[-1] if joined else None
        if last and not (last.name or item.name) and last.tool_index == item.tool_index:
            parameters = last.parameters + item.parameters
            joined[-1] = item.model_copy(update={"parameters": parameters})
        else:
            joined.append(item)
    return joined
