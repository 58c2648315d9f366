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

// Of each of so many rows the tokens that are known: `num_tokens` of the matrix's row, which begins
// `stride` tokens behind the one before.
extern "C" void suffix_take_in(SuffixDecoding* trees, const Token* tokens, std::int64_t stride,
                               const std::int32_t* rows, const std::int32_t* num_tokens,
                               std::int64_t num_rows) {
  for (std::int64_t i = 0; i < num_rows; ++i) {
    trees->take_in(rows[i], tokens + rows[i] * stride, num_tokens[i]);
  }
}

extern "C" std::int64_t suffix_propose(SuffixDecoding* trees, std::int32_t row, const Token* tokens,
                                       std::int64_t num_tokens, std::int64_t most, Token* drafts) {
  return trees->propose(row, tokens, num_tokens, most, drafts);
}

extern "C" void suffix_leave(SuffixDecoding* trees, std::int32_t row) { trees->leave(row); }

extern "C" std::int64_t suffix_num_cached(SuffixDecoding* trees) { return trees->num_cached(); }

extern "C" std::int64_t suffix_cached_bytes(SuffixDecoding* trees) { return trees->cached_bytes(); }

}  // namespace stepwell
