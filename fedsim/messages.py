"""The messages of an experiment: its exchanges, the codecs of their fields, and their sizes on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsim.algorithm import Algorithm, Exchange
from fedsim.learning.params import Layout
from fedsim.round_events import version
from fedsim.wire.codec_selection import select_codecs, unfit
from fedsim.wire.codecs import Codec
from fedsim.wire.envelope import Envelope, Payload, decode, decode_own, encode
from fedsim.wire.message_context import NOTHING, MessageContext
from fedsim.wire.schema import Dims, FieldKind, all_fields
from fedsim.wire.wire_size import RUN_NAME, EnvelopeSize, envelope_size


@dataclass(frozen=True)
class Messages:
    """The messages of an algorithm on one problem.

    dims: the lengths of P, C, K and other dimensions. options: codecs as `--codec` names them. stored_dtype:
    the dtype of inputs that are sent as they are stored, 'u8' or 'f32'.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    dims: Dims
    layout: Layout
    options: Mapping[str, str]
    stored_dtype: str

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the set-up, then those of a round."""
        return (*self.algorithm.setup, *self.algorithm.exchanges)

    @property
    def broadcast_type(self) -> type:
        """The class of the broadcasts to which +last refers; rounds then have one exchange."""
        kind: type = self.algorithm.exchanges[-1].down
        return kind

    @cached_property
    def codecs(self) -> Mapping[str, Mapping[str, str]]:
        """The names of codecs, by direction ('down' or 'up') and field.

        Raises:
            UsageError: If an option of --codec is wrong.
        """
        return select_codecs(self.options, self.exchanges, self.stored_dtype == "u8")

    def unfit(self, candidate: Codec, side: str, field: str, kind: FieldKind) -> str:
        """Return the reason why a codec cannot encode this field; '' if it can."""
        return unfit(candidate, side, field, kind, self.exchanges, self.stored_dtype == "u8")

    def exchange(self, round: int, number: int) -> Exchange:
        """Return an exchange of a round, by its number from 1; round 0 is the set-up."""
        return self.algorithm.exchanges_in(round)[number - 1]

    def version(self, round: int, exchange: int) -> int:
        """Return the version of a client's state that a task of this exchange produces."""
        return version(round, exchange, len(self.algorithm.exchanges), len(self.algorithm.setup))

    def encode(self, message: object, side: str = "", context: MessageContext = NOTHING) -> Payload:
        """Encode a message with the codecs of a direction; without one, dense."""
        return encode(message, self.codecs.get(side, {}), self.dims, context, self.layout)

    def decode(self, kind: type, envelope: Envelope, side: str, owner: str, context: MessageContext) -> Any:
        """Decode a received message of class `kind` (fedsim.wire.envelope.decode). owner: for errors."""
        return decode(kind, envelope, self.codecs[side], self.dims, owner, context, self.layout)

    def sent(self, message: object, side: str = "", context: MessageContext = NOTHING) -> tuple[Payload, Any]:
        """Return the encoded message, and the message as its receiver decodes it."""
        payload = self.encode(message, side, context)
        codecs = self.codecs.get(side, {})
        return payload, decode_own(type(message), payload, codecs, self.dims, context, self.layout)

    @property
    def largest_field(self) -> int:
        """Bytes of the largest field that an envelope of this run may carry, in its widest dtype."""
        kinds = [message for e in self.exchanges for message in (e.down, e.up)]
        sizes = [f.dense_bytes(self.dims) for message in kinds for f in all_fields(message)]
        return max(sizes, default=0)

    def sizes(
        self, round: int, number: int, run: str = RUN_NAME, down: str = "task"
    ) -> dict[str, EnvelopeSize]:
        """Return the sizes of an exchange's envelopes by direction.

        run: the run's name, which is in every header. down: the kind of the downward envelope.
        """
        types = self.exchange(round, number)
        return {
            side: envelope_size(
                *(getattr(types, side), self.codecs[side], self.dims, self.layout),
                kind=kind,
                run=run,
                stored=self.stored_dtype,
            )
            for side, kind in (("down", down), ("up", "upload"))
        }
