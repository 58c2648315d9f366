// The functions of suffix decoding.

#include "suffix_decoding.h"

namespace stepwell {

extern "C" SuffixDecoding* suffix_new(const SuffixSettings& settings) {
  return new SuffixDecoding(settings);
}

extern "C" void suffix_delete(SuffixDecoding* trees) { delete trees; }

extern "C" void suffix_clear(SuffixDecoding* trees) { trees->clear(); }

extern "C" void suffix_enter(SuffixDecoding* trees, std::int32_t row, const char* key,
                             std::int64_t key_bytes, std::int64_t num_tokens) {
  trees->enter(row, std::string(key, key_bytes), num_tokens);
}

// The known tokens of row r are the first num_tokens[r] of `tokens`, from r * stride on.
extern "C" void suffix_take_in(SuffixDecoding* trees, const Token* tokens, std::int64_t stride,
                               const std::int32_t* num_tokens, const std::int32_t* rows,
                               std::int64_t num_rows) {
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const std::int32_t row = rows[i];
    trees->take_in(row, tokens + row * stride, num_tokens[row]);
  }
}

// For the arguments with known tokens, here and below, see suffix_take_in.
extern "C" void suffix_read(SuffixDecoding* trees, const Token* tokens, std::int64_t stride,
                            const std::int32_t* num_tokens, std::int32_t row) {
  trees->read(row, tokens + row * stride, num_tokens[row]);
}

extern "C" std::int64_t suffix_propose(SuffixDecoding* trees, const Token* tokens,
                                       std::int64_t stride, const std::int32_t* num_tokens,
                                       std::int32_t row, std::int64_t most, Token* drafts) {
  return trees->propose(row, tokens + row * stride, num_tokens[row], most, drafts);
}

extern "C" void suffix_leave(SuffixDecoding* trees, std::int32_t row) { trees->leave(row); }

extern "C" std::int64_t suffix_num_cached(SuffixDecoding* trees) { return trees->num_cached(); }

extern "C" std::int64_t suffix_cached_bytes(SuffixDecoding* trees) { return trees->cached_bytes(); }

}  // namespace stepwell
