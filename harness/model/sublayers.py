"""The full verifier's weights with some attention or MLP sublayers left out."""

from jaxtyping import Float
from torch import Tensor

from harness.model.sight import Sight
from harness.model.slim import LayerMask, Mask, SublayerMask
from harness.model.transformer import Transformer


class SublayerTransformer(Transformer):
    """``whole`` without the halves of layers that ``mask`` skips; shares every weight and table with it."""

    def __init__(self, whole: Transformer, mask: SublayerMask) -> None:
        vars(self).update(vars(whole))
        self.mask = mask

    def layer(
        self, index: int, hidden: Float[Tensor, "S E"], entries: tuple[Tensor, Tensor], sight: Sight
    ) -> Float[Tensor, "S E"]:
        """As ``Transformer.layer``, or one half of it."""
        attention, mlp = self.mask.attention[index], self.mask.mlp[index]
        if attention and mlp:
            return super().layer(index, hidden, entries, sight)
        layer = self.weights.layers[index]
        if len(self.devices) > 1:
            hidden = hidden.to(self.layer_devices[index])
        if attention:
            hidden = self.add_attention(layer, hidden, self.attention_input(layer, hidden), entries, sight)
        return self.add_mlp(layer, hidden) if mlp else hidden


def skipping(whole: Transformer, mask: Mask) -> Transformer:
    """What runs ``mask``: ``whole`` itself where layers are skipped as a whole."""
    return whole if isinstance(mask, LayerMask) else SublayerTransformer(whole, mask)
