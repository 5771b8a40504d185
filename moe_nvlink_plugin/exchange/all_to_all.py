"""MoeAllToAll: dispatch and combine of one MoE layer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, SupportsIndex, TypeVar

import torch

from moe_nvlink_plugin import plugins
from moe_nvlink_plugin.config import AllToAllConfig, check_kind
from moe_nvlink_plugin.errors import ConfigError, InputError, MoeNvlinkError
from moe_nvlink_plugin.groups import all_or_none, as_group
from moe_nvlink_plugin.memory.layout import UNITS
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.workspace import ExchangeStats
from moe_nvlink_plugin.recipes import Recipe

from . import agreement, checks, elastic, ops, sizes, tuning
from .calls import Combine, Dispatch, Dispatched, DispatchMetadata
from .in_flight import InFlight
from .layer import LayerExchange
from .small_batches import with_small_tokens

logger = logging.getLogger(__name__)

_NO_PAYLOADS: tuple[torch.Tensor, ...] = ()
_H100_SMS = 132

P = ParamSpec("P")
R = TypeVar("R")


def _begun_by(
    verb: Callable[Concatenate[MoeAllToAll, P], R],
) -> Callable[[Callable[..., InFlight[R]]], Callable[Concatenate[MoeAllToAll, P], InFlight[R]]]:
    """Give a method the signature of the verb that it starts; it gets all arguments by name."""
    signature = inspect.signature(verb)
    _self, *parameters = signature.parameters.values()
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = {p.name for p in parameters}

    def decorate(
        start: Callable[..., InFlight[R]],
    ) -> Callable[Concatenate[MoeAllToAll, P], InFlight[R]]:
        @functools.wraps(start)
        def begin(self: MoeAllToAll, /, *args: P.args, **named: P.kwargs) -> InFlight[R]:
            placed = dict(zip(by_place, args, strict=False))
            given = {**defaults, **placed, **named}
            if given.keys() != names or len(args) != len(placed) or placed.keys() & named.keys():
                signature.bind(self, *args, **named)  # raises TypeError; else it costs most
            return start(self, **given)

        vars(begin)["__signature__"] = signature.replace(
            return_annotation=f"InFlight[{signature.return_annotation}]"
        )
        return begin

    return decorate


class MoeAllToAll:
    """Exchange of one MoE layer among the ranks of an expert-parallel group.

    The caller's experts multiply by the router weights and add up the LOCAL experts of each
    received row. Combine adds these partial rows without weights, in fp32, as a fixed pairwise tree
    over k. So nothing is weighted or added twice.

    torch.compile traces dispatch and combine without a graph break. With `dynamic=True` one graph
    serves every number of tokens from 2 on. To serve 0 and 1 with the same graph, call
    `torch._dynamo.decorators.mark_unbacked(tensor, 0)` on each tensor that has a row for each token
    (`tests/core/exchange/test_ops.py`).

    Attributes:
        config: configuration that `create` got, with defaults filled in.
        recipe: format that travels. If it is a QuantisingRecipe, it can `dequantise` received rows.
    """

    def __init__(self, layer: LayerExchange) -> None:
        self._layer = layer
        self.config = layer.config
        self.recipe = layer.recipe

    @staticmethod
    def check(config: AllToAllConfig) -> Recipe:
        """Check that the rows of a configuration can travel; return its recipe. Local.

        It allocates nothing. Frameworks use it to refuse a configuration before a rank starts;
        `create` checks the same.

        Raises:
            ConfigError: the recipe is unknown; or the recipe, its scales' layout or the format of
                combine does not suit the configuration; or the file of `tuning` cannot be read.
        """
        check_kind(config, AllToAllConfig)
        recipe = plugins.find_recipe(config)
        sizes.payload_rows(config, recipe)
        sizes.quantised_combine_rows(config)
        if isinstance(config.tuning, str) and config.tuning:
            tuning.load(config.tuning)
        return recipe

    @staticmethod
    def memory(config: AllToAllConfig, device: torch.device | str = "cpu") -> dict[str, int]:
        """Return the bytes of a rank's workspace for one layer, by what they are for. Local.

        It allocates nothing. The sum is what `workspace_bytes` says when `create` has made the
        layer. Layers that share a workspace take the largest of them, part by part; on a GPU with
        other SMs than an H100, the part "small batches" may differ.

        Args:
            config: the layer's configuration. A file of `tuning` may be another machine's.
            device: where the tensors would live; a GPU need not be there.

        Raises:
            ConfigError: as `check`; or the file of `tuning` lacks the layer; or there are more
                bytes than a window holds; or the device is neither a CPU nor a CUDA device.
        """
        recipe = MoeAllToAll.check(config)
        kind = torch.device(device).type
        if kind not in UNITS:
            raise ConfigError(f"device={device} is of neither kind: {' or '.join(UNITS)}")
        config = tuning.resolved(config, recipe.name, None)
        limits = with_small_tokens(config, recipe, 0 if kind == "cpu" else _H100_SMS)
        return sizes.memory_by_part(limits, recipe, UNITS[kind])

    @classmethod
    def create(
        cls,
        config: AllToAllConfig,
        group: Any,
        device: torch.device | str = "cpu",
        *,
        share_with: MoeAllToAll | None = None,
    ) -> MoeAllToAll:
        """Create the exchange of one layer. Collective; not capturable.

        Args:
            config: equal on every rank, `ep_rank` and what may differ by rank apart; files of
                `tuning` must say the same.
            group: a torch ProcessGroup (with a CPU backend), or an object with rank, size and
                all_gather_object.
            device: where the tensors live.
            share_with: another layer of the same group; both layers then use its workspace, which
                grows if this layer needs more.

        With config.places, `group` has the ranks of these places only, and later `leave`, `renew`
        and `join` change who is there.

        Raises:
            ExchangeStateError: `mask` has left out ranks of share_with's workspace, which would
                have to take part. Raised on every rank.
            ConfigError: the configuration does not fit the group, or names unknown parts; or its
                file of choices (tuning) is torn, or belongs to another machine or layer.
            DisagreementError: the ranks' configurations differ; raised on every rank.
            UnsupportedError: no transport supports the device.
            TransportError, CompileError: this rank could not get its memory or its kernels.
            PeerError: another rank failed, or did not arrive. Nothing of this call remains.
        """
        check_kind(config, AllToAllConfig)
        sharing = None if share_with is None else _layer_of(share_with)
        if sharing is not None:
            if sharing.workspace.is_parents:
                sharing.workspace.check_usable()
            agreement.check_complete(sharing.workspace)
        # Nothing of this rank's has run yet, so start-up's limit holds.
        ranks = as_group(group, Timeouts.of(config).first)
        prepared = all_or_none(
            ranks,
            "preparing the exchange",
            lambda: agreement.prepare(config, ranks, torch.device(device), sharing),
        )
        config, recipe, workspace = prepared.config, prepared.recipe, prepared.workspace
        num_sms = agreement.check_agreement(prepared, shares=sharing is not None)
        # Equal on all ranks, which agree on the rest. Before they have agreed, an error here would
        # be this rank's alone, and the others would wait for it.
        config = with_small_tokens(config, recipe, num_sms)
        number = workspace.ensure(lambda alignment: sizes.layer_layout(config, recipe, alignment))
        try:
            layer = all_or_none(
                prepared.group,
                "loading the kernels",
                lambda: LayerExchange(config, recipe, workspace, number),
            )
        except Exception:
            workspace.release()
            raise
        return cls(layer)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        extra_payloads: Sequence[torch.Tensor] = _NO_PAYLOADS,
        *,
        scales: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        is_padding: torch.Tensor | None = None,
        max_tokens: int | None = None,
        active_ranks: torch.Tensor | None = None,
        expert_counts: torch.Tensor | None = None,
        channel: int = 0,
    ) -> Dispatched:
        """Send each token once to every rank that owns one of its experts. Collective; capturable.

        Args:
            hidden_states: `[num_tokens, hidden_size]` config.dtype: activations, which a quantising
                recipe quantises while they travel; or `[num_tokens, elements]` in the recipe's
                dtype: rows that the caller has quantised. num_tokens may be 0, may differ between
                ranks, and is at most max_tokens.
            topk_ids: `[num_tokens, top_k]` int32 or int64, global expert ids. An id outside
                0..num_experts-1 (such as -1, for padding) has no destination.
            topk_weights: `[num_tokens, top_k]` float32. They travel; dispatch does not apply them.
            extra_payloads: each `[num_tokens, ...]`, any dtype. Their number and the bytes of their
                rows may change from call to call, up to extra_payload_bytes, and are equal on all
                ranks.
            scales: `[num_tokens, scales per row]`, if the caller has quantised the rows and the
                recipe has scales.
            global_scale: one float32 on the device, from 2^-126 to 2^126; for activations and the
                recipes that need it (fp8_tensor, nvfp4). On CPU every call checks the value. On a
                GPU a check waits for the device, so only the first call with a tensor at this
                address checks it, and no call during the capture of a CUDA graph.
            is_padding: `[num_tokens]` bool; None: no token is padding. A token that is padding has
                no destination, whatever its ids are. The kernel reads the values, so a CUDA graph
                that has captured the call takes what the tensor holds at each replay.
            max_tokens: bound of this call: no rank dispatches more tokens. Equal on all ranks,
                1..max_tokens_per_rank; None: max_tokens_per_rank. The round then has
                `ep_size * max_tokens` slots, so experts that compute all slots of a small batch do
                not compute those of the largest. The memory does not move. The bound may change
                from call to call; a CUDA graph keeps the bound of its capture.
            active_ranks: what `rank_mask` or the attribute `active_ranks` returns, equal on all
                ranks that it names; None: all ranks take part, apart from those that `mask` has
                left out. The ranks that the mask leaves out must not call. No rank sends
                to them or waits for them, here and in the combine, and their experts count
                as no experts. The kernel reads the values, so a CUDA graph that has captured the
                call takes what the tensor holds at each replay. A rank that a round has left out
                cannot take part in later rounds on this workspace. A rank that lives may leave
                after any combine, whose result is whole: the first dispatch that leaves it out
                waits until that combine has read the other ranks' rows, at most as long as for a
                rank that takes part. If a rank has died, call `mask`. On a GPU it is checked as
                global_scale is that the mask names this rank. With ranks_may_leave=False the
                attribute `active_ranks` only.
            expert_counts: `[num_expert_counts]` int32 that the caller has counted. None: dispatch
                counts how often this rank's topk_ids name each expert; num_expert_counts must be
                num_experts or 0. It does not count tokens that are padding, ids that are no
                expert, and experts of ranks that active_ranks leaves out. An id that a token has
                twice counts twice.
            channel: number of the independent exchange, 0..num_channels-1.

        Raises:
            InputError: an argument is not as above. Nothing was sent.
            ExchangeStateError: the exchange is closed, or the channel's last dispatch has not been
                combined.
            ExchangeTimeoutError: another rank did not arrive within timeout_s (first_timeout_s
                until the second complete round); or a rank that active_ranks leaves out has not
                ended the combine before (phase "combine").
            DisagreementError: another rank dispatched with another max_tokens or active_ranks, with
                extra payloads of other sizes, or through another layer. Ranks compare 7 bits, so on
                average one such pair in 128 goes unnoticed; of layers that differ in nothing but
                their numbers on the workspace, only pairs whose numbers are 128 apart. If only one
                of two ranks leaves the other out, the other one waits in vain. Or another rank's
                combine before this dispatch had rows of another type or width (see combine).
            PeerError: another rank continued after a failure of its own.
        """
        layer = self._layer
        bound = layer.config.max_tokens_per_rank if max_tokens is None else max_tokens
        call = Dispatch(
            hidden_states,
            scales,
            topk_ids,
            topk_weights,
            [] if extra_payloads is _NO_PAYLOADS else checks.sequence_of(extra_payloads),
            global_scale,
            layer.handle,
            channel,
            is_padding,
            bound,
            active_ranks,
            expert_counts,
        )
        if torch.compiler.is_compiling():
            return ops.dispatched(layer, call, bound)
        try:
            quantiser = layer.ordinary.quantiser_of(call)
            if quantiser is None and ops.are_seen(call):
                return ops.dispatched(layer, call, bound)
            return layer.dispatch(call, quantiser)
        except RuntimeError:  # torch's
            checks.dense_tensors(call)
            raise

    @_begun_by(dispatch)
    def dispatch_async(self, **given: Any) -> InFlight[Dispatched]:
        """Start a dispatch that runs beside the caller. Collective; capturable.

        The arguments are those of dispatch. Nobody writes to the tensors before `wait`. Verbs of
        different channels may be in flight together.

        On a GPU the kernel runs on a stream of the channel, which first waits for the caller's
        current stream; on CPU ranks it runs on a thread. `wait` of the result ends the verb: not
        before that may combine follow. Other ranks may call `dispatch` for the same round. While
        the kernel waits for a late rank, some of its CTAs keep their place: with max_sms, or
        MOE_NVLINK_MAX_SMS, or with leave_sms, it takes fewer.

        torch.compile cannot trace it.

        Raises:
            InputError, ExchangeStateError: as dispatch; also if the verb before in this channel
                still runs beside its caller.
        """
        given["extra_payloads"] = checks.sequence_of(given["extra_payloads"])
        call = Dispatch(handle=self._layer.handle, **given)
        try:
            return self._layer.dispatch_async(call)
        except RuntimeError:
            checks.dense_tensors(call)
            raise

    def combine_input(
        self,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: int | None = None,
        metadata: DispatchMetadata | None = None,
        channel: int = 0,
    ) -> torch.Tensor:
        """Return memory for the experts' output, from which combine copies nothing. Local.

        Args:
            dtype: type of the rows; None: config.dtype. Otherwise one of config.combine_dtypes.
            hidden_size: elements of a row; None: config.hidden_size. Rows of another width need as
                many bytes as those of hidden_size elements of the widest type, or fewer.
            metadata: that of the dispatch; it names channel and bound. None: the memory of all
                slots of `channel`.
            channel: number of the channel if there is no metadata.

        Returns:
            `[ep_size * max_tokens, hidden_size]` of `dtype`, in the slots of the received rows,
            with the bound of the dispatch; max_tokens_per_rank without metadata. A view of all
            slots begins with those of a smaller bound. Write to it only between dispatch and
            combine. Combine never reads empty slots.

        Raises:
            InputError: combine does not reduce `dtype`, there is no room for such rows, or metadata
                belongs to another exchange.
            ExchangeStateError: the exchange is closed, or its memory released.
        """
        config, layer = self.config, self._layer
        layer.check_open()
        layer.workspace.check_mapped()
        dtype = dtype or config.dtype
        if dtype not in layer.format.combine_dtypes:
            reduced = ", ".join(map(str, layer.format.combine_dtypes))
            raise InputError(
                f"combine_input of {dtype} was asked for, combine reduces {reduced}; create the "
                "exchange with that dtype, name it in combine_dtypes, or convert the experts' "
                "output"
            )
        if hidden_size is not None:
            checks.combine_width(layer.format, dtype, hidden_size)
        width = config.hidden_size if hidden_size is None else hidden_size
        if metadata is not None:
            layer.check_metadata(metadata, any_round=True)
            found = layer.channel(metadata.channel)
            return found.combine_input(metadata.max_tokens, dtype, width)
        found = layer.channel(channel)
        if (dtype, width) == (config.dtype, config.hidden_size):
            return found.combine_region
        return found.combine_input(config.max_tokens_per_rank, dtype, width)

    def combine(
        self,
        expert_output: torch.Tensor,
        metadata: DispatchMetadata,
        *,
        output: torch.Tensor | None = None,
        hidden_size: int | None = None,
        add: torch.Tensor | None = None,
        scale: float = 1,  # not 1.0, of which a dynamic torch.compile would make an input
    ) -> torch.Tensor:
        """Fetch the partial rows of this rank's tokens and add them up. Collective; capturable.

        With `add` and `scale` it also does what often follows: it applies a router's scaling factor
        and adds the output of shared experts, or a residual. The result is `scale * sum + add` in
        fp32, rounded to the type of expert_output once.

        Args:
            expert_output: `[ep_size * max_tokens, hidden_size]`, config.dtype or one of
                config.combine_dtypes: weighted sums over this rank's experts, in the slots of the
                received rows; max_tokens is the bound of the dispatch. If it is not the memory of
                combine_input(), it is copied there first.
            metadata: that of the dispatch.
            output: `[num_tokens, hidden_size]` in the type of expert_output; None allocates it.
            hidden_size: elements of a row in this call; None: config.hidden_size. It may be any
                width for which combine_input has room. Type and width must be equal on all ranks.
            add: `[num_tokens, hidden_size]` in the type of expert_output: rows of this rank's
                tokens that are added to the scaled sums; None adds nothing. Ranks need not agree
                on it. It may be `output`, which then is overwritten in place, but it may overlap
                neither a part of `output` nor the exchange's workspace.
            scale: what the sums are multiplied by, as float32; finite. Ranks need not agree on it.
                A CUDA graph keeps the value of its capture.

        Returns:
            `[num_tokens, hidden_size]` in the type of expert_output. A token without a valid expert
            gets its row of `add` (its sum is -0.0), or zeros without `add`. The same rows, routing,
            add and scale give the same bits, whatever the timing. Of several NaNs, kernels for
            small and for large batches may keep another one's bits.

        Raises:
            InputError, ExchangeStateError, ExchangeTimeoutError, PeerError: as dispatch.
            DisagreementError: another rank combined rows of another type or width. Two types of
                one width never go unnoticed; of 128 pairs of widths one does. For a small batch
                (small_combine_tokens) and rows without a format, this combine may return wrong
                sums, or raise ExchangeTimeoutError; if it raises nothing, the channel's next
                dispatch raises DisagreementError.
        """
        layer, is_compiling = self._layer, torch.compiler.is_compiling()
        layer.check_metadata(metadata, any_round=is_compiling)
        call = Combine(
            expert_output,
            metadata.send_slots,
            output,
            layer.handle,
            metadata.channel,
            hidden_size,
            add,
            scale,
        )
        if is_compiling:
            return ops.combined(layer, call)
        try:
            is_ordinary = layer.ordinary.is_combine(call)
            if not is_ordinary and ops.are_seen(call):
                return ops.combined(layer, call)
            return layer.combine(call, is_ordinary=is_ordinary)
        except RuntimeError:
            checks.dense_tensors(call)
            raise

    @_begun_by(combine)
    def combine_async(self, metadata: DispatchMetadata, **given: Any) -> InFlight[torch.Tensor]:
        """Start a combine that runs beside the caller. Collective; capturable.

        The arguments are those of combine. Nobody writes to the tensors before `wait`, and the rows
        of `add` are complete when this verb starts.

        It runs as dispatch_async does. The experts' rows are in place when it starts. If
        expert_output is not the memory of combine_input(), the copy comes before, on the caller's
        stream. torch.compile cannot trace it.

        Raises:
            InputError, ExchangeStateError: as combine; also if the dispatch still runs beside its
                caller.
        """
        layer = self._layer
        layer.check_metadata(metadata)
        slots, channel = metadata.send_slots, metadata.channel
        call = Combine(send_slots=slots, handle=layer.handle, channel=channel, **given)
        try:
            return layer.combine_async(call)
        except RuntimeError:
            checks.dense_tensors(call)
            raise

    def synchronize(self) -> None:
        """Wait for this thread's stream and raise the error of a verb that failed. Local.

        Not capturable. On CPU ranks a verb has run when it returns. On GPUs a verb runs later; its
        error is raised by the next verb, or here.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError: as dispatch.
            InputError: active_ranks left out this rank when the kernel read it.
        """
        self._layer.synchronize()

    def hold_startup(self) -> None:
        """Make waits last up to first_timeout_s until `end_startup` is called. Local.

        It applies to all layers on the workspace. Use it if ranks compile or tune after the first
        round. Without it start-up ends with the second complete round. The capture of a CUDA graph
        also ends it.
        """
        self._layer.workspace.startup.hold()

    def end_startup(self) -> None:
        """Make waits last up to timeout_s, from this rank's next launch on. Local; idempotent."""
        self._layer.workspace.startup.end()

    def mask(self, *ranks: int) -> None:
        """Go on without ranks that have died. Collective over the others; not capturable.

        Call it on every rank that lives, with the same ranks, after ExchangeTimeoutError, or when
        the process of a rank is known to have ended; no verb of any layer may be running, apart
        from those beside their caller, whose end it waits for. It waits for the device, and for the
        other ranks twice, each time up to twice timeout_s (during start-up: first_timeout_s),
        because they may still be waiting for the dead rank. Which ranks are dead is for the caller
        to say: an error may also name a rank that was late because of them.

        It serves all layers on the workspace. A dispatch without its combine is forgotten, and the
        metadata of earlier rounds is refused. Epochs begin at 1 again. Later dispatches that name
        no active_ranks leave out these ranks, and those of earlier calls. A rank that is left out
        cannot come back, and no layer can be added to the workspace.

        A CUDA graph whose dispatches were captured with `active_ranks=exchange.active_ranks`, or
        after a call of this function, leaves out the same ranks from its next replay on. Another
        graph must be captured again: its replay fails at once, and the next verb raises
        PeerError, which names the rank that is left out.

        A rank that is left out although it lives must be ended. Most often its next verb raises
        ExchangeTimeoutError. But a combine whose dispatch had ended before waits for nobody more:
        it reads rows that may be those of the others' next rounds, and raises nothing.

        Raises:
            InputError: a rank is not one of the group, or it is this rank. Nothing has changed.
            ExchangeStateError: the exchange is closed, or unusable for another reason.
            DisagreementError: another rank leaves out other ranks; call it again. It may be
                ExchangeTimeoutError instead, if a third rank is missing too.
            ExchangeTimeoutError: a rank did not come; call it again, with that rank if it has died.
        """
        self._layer.mask(ranks)

    def leave(self, *ranks: int) -> None:
        """Let ranks that live go. Collective over all ranks, those too; not capturable.

        Call it on every rank between two rounds, with the same ranks. It waits for the device and
        until every rank has ended its verbs, so nobody reads the memory of a rank that goes. On the
        ranks that stay it then does what `mask` does. A rank that goes can do nothing more than to
        close its layers. The bounds of the waits are those of `mask`.

        Raises:
            InputError: a rank is not one that takes part, or all of them are named. Nothing has
                changed.
            ExchangeStateError: a dispatch has not been combined, or the exchange is unusable; after
                a failure call `mask` or `renew`.
            DisagreementError, ExchangeTimeoutError: as `mask`.
        """
        self._layer.leave(ranks)

    def renew(self, group: Any, places: Sequence[int]) -> None:
        """Go on with other ranks: some return, join or leave. Collective over `group`.

        Not capturable. Ranks that have this exchange call it on one of their layers, for all layers
        on the workspace. New ranks call `join` meanwhile, also one in the place of a rank that has
        died. Every rank gets zeroed memory at the addresses that its layers and CUDA graphs have;
        epochs begin at 1 and start-up's limit holds again, because new ranks may compile. Counters
        go on. A dispatch without its combine is forgotten. Tensors that dispatch and combine_input
        have returned hold zeros then; on a GPU touch none of them before a renewal has ended well.
        What a late process of a dead rank still writes reaches nobody.

        If an exchange was created without config.places, all places must have a rank.

        What refuses a call (the first three below) leaves all as it was; verbs in flight go on.

        Args:
            group: as for `create`, of the ranks from now on; StoreGroup makes one over a Store.
            places: the places of the group's ranks, in its order; this rank's among them.

        Raises:
            InputError, ConfigError: places do not suit the group. Raised on every rank of it.
            ExchangeStateError: the exchange is closed, has no places to leave empty, or the stream
                captures a CUDA graph. Raised as PeerError on the others.
            DisagreementError: the layers of the ranks differ; raised on every rank.
            TransportError, PeerError: a rank could not get memory, or did not come. The exchange
                cannot be used before another `renew`, maybe without that rank, has ended.
        """
        elastic.renew(self._layer, group, places)

    def release(self) -> None:
        """Give the memory back until `renew`. Collective over all ranks that take part.

        Not capturable. Ranks call it between two rounds, on one of their layers, for all layers on
        the workspace. It waits for the device. Afterwards no symmetric memory is left; layers,
        kernels, counters and addresses stay, so `renew(group, places)` with the same ranks goes on
        where this stopped, and CUDA graphs stay valid. Until then verbs raise ExchangeStateError;
        nobody touches tensors that dispatch, combine_input and fault_words have returned, or
        replays a graph. A second call changes nothing.

        Raises:
            ExchangeStateError: a dispatch has not been combined, the exchange is unusable, or the
                stream captures a CUDA graph. Raised as PeerError on the others. Or the exchange is
                closed here, this process is a fork, or `mask` has left out a rank; then this rank
                alone raises, and the others wait for it. Nothing has changed.
            UnsupportedError: the memory of a third-party transport cannot be released.
            DisagreementError: another rank calls something else.
            TransportError, DriverError, PeerError: a rank could not unmap the memory, or did not
                come; call `release` again, or `renew`. A StoreGroup that has failed serves no
                further call, so then `renew` with a new one.
        """
        elastic.release(self._layer)

    @classmethod
    def join(
        cls, configs: Sequence[AllToAllConfig], group: Any, device: torch.device | str = "cpu"
    ) -> list[MoeAllToAll]:
        """Enter an exchange whose ranks call `renew` meanwhile. Collective; not capturable.

        Args:
            configs: of the open layers on the workspace, in the order of their creation; equal to
                those of the other ranks, except that `ep_rank`, `num_threads` and `max_sms` are
                this rank's, `places` are the new ones, and `small_tokens` and
                `small_combine_tokens` are taken from the others.
            group: the ranks from now on.
            device: where the tensors live.

        Returns:
            The layers, one for each configuration.

        Raises:
            InputError: there is no configuration, or no rank of the group has the exchange.
            MoeNvlinkError: as `create` and `renew`. Nothing of this call remains.
        """
        return [cls(layer) for layer in elastic.join(configs, group, torch.device(device))]

    @property
    def places(self) -> tuple[int, ...]:
        """Places whose ranks take part. Local."""
        left_out = self._layer.workspace.left_out
        return tuple(place for place in range(self.config.ep_size) if place not in left_out)

    @property
    def active_ranks(self) -> torch.Tensor:
        """Mask of the ranks that `mask` has not left out, for dispatch(active_ranks=...). Local.

        All layers on the workspace have one tensor, whose content `mask` changes. Do not write to
        it. A CUDA graph that has captured it need not be captured again after a death. A round with
        a mask of all ranks is one without a mask, apart from the loads of the mask.
        """
        tensor = self._layer.workspace.active_ranks
        assert tensor is not None
        return tensor

    def failure(self) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local; any thread may call it.

        It waits for nothing. It serves programs that only replay CUDA graphs, because a replay
        raises no error. After a failure this rank's verbs exchange nothing, and combine writes NaN.
        """
        return self._layer.failure()

    def fault_words(self) -> list[torch.Tensor]:
        """Return a word of each channel, on the device: not 0 if a verb has failed there. Local.

        Each is a view of one int64. A stream that reads it after a verb sees that verb's failure;
        frameworks that ask after each step need no wait for the device. `mask` and `renew` clear
        it.
        """
        return self._layer.fault_words()

    def stats(self, *, wait: bool = True) -> ExchangeStats:
        """Return this rank's totals over all layers on the workspace. Local; not capturable.

        It waits for this thread's stream. Verbs on other streams may be missing in the totals.

        Args:
            wait: False: wait for no launch, so running verbs may be missing. Then any thread may
                call, also while another thread captures a CUDA graph.
        """
        return self._layer.workspace.stats(wait=wait)

    def waits(self) -> list[list[int]]:
        """Return the nanoseconds that rank r has waited for rank p, as [r][p]. Local; any thread.

        It reads ExchangeStats.waited_ns of every rank in the peers' memory, and waits for nothing.
        """
        return self._layer.workspace.waits()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of this rank's workspace, shared by all layers on it; 0 if released or closed."""
        return self._layer.workspace.mapped_bytes

    def close(self) -> None:
        """Close this layer; the last layer on a workspace also gives up the workspace. Local.

        On a GPU it waits for the device, so no thread may capture a CUDA graph on it meanwhile. On
        CPU ranks it waits for verbs that run beside their caller, at most as long as these wait for
        other ranks; so does Python at its exit. Tensors that dispatch returned stay readable; the
        next close or create in the process frees the memory that they kept. If a CUDA graph has
        captured the memory, it stays mapped until the process ends, and a warning says so, because
        a replay would still write to it.
        """
        self._layer.close()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a MoeAllToAll cannot be copied or pickled; every rank calls MoeAllToAll.create, by "
            "share_with on the same memory"
        )

    def __enter__(self) -> MoeAllToAll:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _layer_of(share_with: MoeAllToAll) -> LayerExchange:
    if not isinstance(share_with, MoeAllToAll):
        raise InputError(
            f"share_with is a {type(share_with).__name__}; pass another layer (MoeAllToAll) of the "
            "same group, or leave it out"
        )
    return share_with._layer
