// The functions of sampling, for logits in float32.

#include "sampling.h"

namespace stepwell {

// The number of values in RowParameters for each row.
extern "C" std::int64_t num_row_values() { return NUM_ROW_VALUES; }

// Samples a token for each of the rows: its id, UNUSABLE, or REFUSED.
extern "C" void sample_rows(const LogitRows& rows, const RowMasks& masks,
                            const RowParameters& parameters, std::int64_t* token_ids) {
  double per_byte = 0;
  for (std::int64_t i = 0; i < rows.count; ++i) per_byte += work_per_byte(rows, i, parameters);
  for_each_row(rows, per_byte, [&](std::int64_t index) {
    token_ids[index] = sample_row(rows, masks, index, parameters);
  });
}

// Copies the rows, one after the other, see copy_row.
extern "C" void copy_rows(const LogitRows& rows, const RowMasks& masks, float* copies,
                          bool* usable) {
  for_each_row(rows, double(rows.count), [&](std::int64_t index) {
    float* copy = copies + index * rows.size;
    usable[index] = copy_row(rows.of(index), rows.size, masks.of(index), copy);
  });
}

}  // namespace stepwell
