// Drafts by suffix trees: a tree of each request's tokens, and for each key a tree of responses.
//
// Suffix decoding (Oliaro et al., arXiv 2411.04975), by the rules of vLLM's method "suffix".

#pragma once

#include <deque>
#include <string>
#include <unordered_map>

#include "suffix_tree.h"

namespace stepwell {

struct SuffixSettings {
  std::int64_t depth;       // Maximum number of tokens in a match and its drafts together.
  std::int64_t max_cached;  // Maximum number of responses that are kept after their requests leave.
  std::int64_t max_bytes;   // Maximum memory of the trees of responses.
  DraftRules rules;
};

class SuffixDecoding {
 public:
  explicit SuffixDecoding(const SuffixSettings& settings)
      : settings_(settings), responses_(settings.depth) {}

  // Adds a request with `num_tokens` known tokens in a free row of the batch. Later tokens are the
  // request's response, from which requests with the same key get drafts.
  void enter(std::int32_t row, std::string key, std::size_t num_tokens) {
    rows_.insert_or_assign(row, Row{std::move(key), num_tokens, settings_.max_cached > 0});
  }

  // Appends a row's new tokens to the responses. If the responses are too many or too large, for
  // each new token a few tokens of the response that ended first are removed. If there is no memory
  // for a new token, the row's response ends.
  void take_in(std::int32_t row, const Token* tokens, std::size_t num_tokens) {
    const auto found = rows_.find(row);
    if (found == rows_.end()) return;
    Row& own = found->second;
    for (; own.is_recorded && own.num_taken_in < num_tokens; ++own.num_taken_in) {
      if (responses_.bytes() >= std::size_t(settings_.max_bytes)) {
        end_response(own);
      } else {
        if (own.response == NO_SEQUENCE) begin_response(own);
        responses_.append(own.response, tokens[own.num_taken_in]);
      }
      for (int i = 0; i < NUM_FORGOTTEN && has_too_much(); ++i) forget_token();
    }
  }

  // Appends a row's new tokens to the request's own tree. The first call takes time in proportion
  // to the prompt's length.
  void read(std::int32_t row, const Token* tokens, std::size_t num_tokens) {
    const auto found = rows_.find(row);
    if (found != rows_.end()) read(found->second, tokens, num_tokens);
  }

  // Writes up to `most` drafts after a row's tokens, and returns their number. If the scores of
  // both trees are equal, the request's own tree is used.
  std::size_t propose(std::int32_t row, const Token* tokens, std::size_t num_tokens,
                      std::size_t most, Token* drafts) {
    const auto found = rows_.find(row);
    if (found == rows_.end()) return 0;
    Row& own = found->second;
    read(own, tokens, num_tokens);
    const DraftRules& rules = settings_.rules;
    Draft best = own.tree->guess(own.root, own.sequence, tokens, num_tokens, most, rules);
    if (const auto tree = trees_.find(own.key); tree != trees_.end()) {
      const NodeId root = tree->second.root;
      Draft other = responses_.guess(root, own.response, tokens, num_tokens, most, rules);
      if (other.score > best.score) best = std::move(other);
    }
    std::copy(best.tokens.begin(), best.tokens.end(), drafts);
    return best.tokens.size();
  }

  // Removes the request in a row, but not its response.
  void leave(std::int32_t row) {
    const auto found = rows_.find(row);
    if (found == rows_.end()) return;
    end_response(found->second);
    rows_.erase(found);
  }

  void clear() {
    rows_.clear();
    trees_.clear();
    ended_.clear();
    responses_ = SuffixTree(settings_.depth);
  }

  std::size_t num_cached() const { return ended_.size(); }
  std::size_t cached_bytes() const { return responses_.bytes(); }

 private:
  static constexpr int NUM_FORGOTTEN = 4;  // Tokens to remove for each new one.

  struct Row {
    std::string key;
    std::size_t num_taken_in;  // Tokens at entry, plus tokens of the response.
    bool is_recorded;          // Whether responses are kept, and this one has not ended.
    SequenceId response = NO_SEQUENCE;
    std::unique_ptr<SuffixTree> tree = nullptr;
    NodeId root = NO_NODE;
    SequenceId sequence = NO_SEQUENCE;
  };

  struct Tree {
    NodeId root;
    std::size_t num_responses = 0;
  };

  struct Response {
    std::string key;
    SequenceId sequence;
  };

  void read(Row& own, const Token* tokens, std::size_t num_tokens) {
    if (own.tree == nullptr) {
      own.tree = std::make_unique<SuffixTree>(settings_.depth);
      own.root = own.tree->add_root();
      own.sequence = own.tree->open(own.root);
    }
    for (std::size_t at = own.tree->size(own.sequence); at < num_tokens; ++at) {
      own.tree->append(own.sequence, tokens[at]);
    }
  }

  void begin_response(Row& own) {
    auto tree = trees_.find(own.key);
    if (tree == trees_.end()) tree = trees_.emplace(own.key, Tree{responses_.add_root()}).first;
    ++tree->second.num_responses;
    own.response = responses_.open(tree->second.root);
  }

  // Called when a request leaves, or when there is no room for its response.
  void end_response(Row& own) {
    own.is_recorded = false;
    if (own.response == NO_SEQUENCE) return;
    responses_.close(own.response);
    ended_.push_back({own.key, own.response});
    own.response = NO_SEQUENCE;
  }

  // An eighth of the memory is left free, because a new token may need more memory than the removed
  // tokens free.
  bool has_too_much() const {
    const std::size_t most = settings_.max_bytes - settings_.max_bytes / 8;
    const bool is_large = responses_.bytes() > most;
    return !ended_.empty() && (is_large || ended_.size() > std::size_t(settings_.max_cached));
  }

  // Removes the first token of the response that ended first.
  void forget_token() {
    const Response& oldest = ended_.front();
    if (!responses_.forget_first(oldest.sequence)) return;
    const auto tree = trees_.find(oldest.key);
    if (--tree->second.num_responses == 0) {
      responses_.remove_root(tree->second.root);
      trees_.erase(tree);
    }
    ended_.pop_front();
  }

  const SuffixSettings settings_;
  SuffixTree responses_;
  std::unordered_map<std::int32_t, Row> rows_;
  std::unordered_map<std::string, Tree> trees_;  // By key.
  std::deque<Response> ended_;                   // In the order in which they ended.
};

}  // namespace stepwell
