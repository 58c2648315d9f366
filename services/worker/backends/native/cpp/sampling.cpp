// The functions of sampling, for logits in float32.

#include "sampling.h"

namespace stepwell {

// How many values RowParameters has of each row.
extern "C" std::int64_t num_row_values() { return NUM_ROW_VALUES; }

// A token for each of the rows, or UNUSABLE.
extern "C" void sample_rows(const LogitRows& rows, const RowParameters& parameters,
                            std::int64_t* token_ids) {
  for_each_row(rows,
               [&](std::int64_t index) { token_ids[index] = sample_row(rows, index, parameters); });
}

// Copies of the rows, one behind the other, see copy_row. `masks`: of each row, or null.
extern "C" void copy_rows(const LogitRows& rows, const std::uint32_t* const* masks, float* copies,
                          bool* usable) {
  for_each_row(rows, [&](std::int64_t index) {
    float* copy = copies + index * rows.size;
    usable[index] = copy_row(rows.of(index), rows.size, masks[index], copy);
  });
}

}  // namespace stepwell
