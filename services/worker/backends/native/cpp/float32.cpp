// The functions for float32, and the functions with which Python checks the compiled structures.

#include <string_view>

#include "exports.h"
#include "sampling.h"
#include "suffix_decoding.h"

namespace stepwell {

// Number of columns in a panel. Packed weights are padded to whole panels.
extern "C" int panel_width() { return PANEL_WIDTH; }

// The order in which products of bfloat16 are added, as an index of SumOrder (choices.py).
extern "C" int bfloat16_order() {
  if (SUMS_LIKE_TILES<BFloat16>) return 1;
  return PanelOps<BFloat16>::HAS_DOT_PRODUCTS ? 2 : 0;
}

// The result of num_tile_palettes, or 1 if tiles are emulated.
extern "C" int tile_palettes() { return tiles::ARE_EMULATED ? 1 : num_tile_palettes(); }

// The bytes of a structure, or 0 for an unknown name. A structure has the same size for all element
// types.
extern "C" std::int64_t structure_size(const char* name) {
  const std::string_view wanted = name;
  if (wanted == "Projection") return sizeof(Projection<float>);
  if (wanted == "QuantizedWeight") return sizeof(QuantizedWeight);
  if (wanted == "AttentionLayer") return sizeof(AttentionLayer);
  if (wanted == "Layout") return sizeof(Layout);
  if (wanted == "Heads") return sizeof(Heads<float>);
  if (wanted == "Pages") return sizeof(Pages);
  if (wanted == "LayerWeights") return sizeof(LayerWeights<float>);
  if (wanted == "DecoderLayer") return sizeof(DecoderLayer<float>);
  if (wanted == "Rotation") return sizeof(Rotation<float>);
  if (wanted == "Decoder") return sizeof(Decoder<float>);
  if (wanted == "SharedRanks") return sizeof(SharedRanks);
  if (wanted == "LoraProjection") return sizeof(LoraProjection<float>);
  if (wanted == "LoraLayer") return sizeof(LoraLayer<float>);
  if (wanted == "StepLora") return sizeof(StepLora<float>);
  if (wanted == "LoraDelta") return sizeof(LoraDelta<float>);
  if (wanted == "LogitRows") return sizeof(LogitRows);
  if (wanted == "RowMasks") return sizeof(RowMasks);
  if (wanted == "RowParameters") return sizeof(RowParameters);
  if (wanted == "SuffixSettings") return sizeof(SuffixSettings);
  return 0;
}

EXPORT(float32, float)

}  // namespace stepwell
