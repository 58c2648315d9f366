// The strings of up to `depth` tokens in growing sequences, and how often each occurs.
//
// A string that occurs once is a leaf, which stores the string's position in a sequence. The
// sequence's next tokens continue the string, so text that does not repeat itself needs one node
// for each token. If the string occurs again, its leaf becomes an inner node, and the string with
// one more token becomes a leaf.
//
// An appended token extends each of the strings that ended before it by one node. The last m tokens
// of a sequence are an inner node for every m up to some length. Longer suffixes occur nowhere
// else, so their leaf does not change when the sequence grows.

#pragma once

#include <algorithm>
#include <vector>

#include "token_trie.h"

namespace stepwell {

// Proposed tokens, and the sum of their probabilities.
struct Draft {
  double score = 0;
  std::vector<Token> tokens;
};

struct DraftRules {
  double max_spec_factor;  // Maximum number of drafts, as a multiple of matching tokens.
  double min_token_prob;   // Minimum of the product of frequencies up to a draft.
};

class SuffixTree {
 public:
  // `depth`: maximum number of tokens in a string.
  explicit SuffixTree(std::size_t depth) : depth_(depth) {}

  std::size_t bytes() const { return trie_.bytes() + num_tokens_ * sizeof(Token); }

  // Adds a root. Sequences of different roots share no strings.
  NodeId add_root() { return trie_.add_root(); }

  // Removes a root without sequences.
  void remove_root(NodeId root) { trie_.remove(root); }

  // Adds a sequence without tokens.
  SequenceId open(NodeId root) {
    if (free_.empty()) {
      free_.push_back(SequenceId(sequences_.size()));
      sequences_.emplace_back();
    }
    const SequenceId id = free_.back();
    free_.pop_back();
    sequences_[id].root = root;
    sequences_[id].is_open = true;
    return id;
  }

  std::size_t size(SequenceId id) const { return sequences_[id].tokens.size(); }

  void append(SequenceId id, Token token) {
    Sequence& sequence = sequences_[id];
    sequence.tokens.push_back(token);
    ++num_tokens_;
    ends_.clear();
    NodeId node = sequence.root;
    // Shortest string first, because a leaf can become an inner node only after all shorter strings
    // are inner nodes.
    for (std::size_t length = 1;; ++length) {
      const NodeId end = extend(node, token, id, length);
      if (end != NO_NODE) ends_.push_back(end);
      if (length > sequence.ends.size() || length == depth_) break;
      node = sequence.ends[length - 1];
    }
    sequence.ends.swap(ends_);
  }

  // Closes a sequence: no tokens will be appended.
  void close(SequenceId id) {
    sequences_[id].is_open = false;
    sequences_[id].ends = {};
  }

  // Removes the first token of a closed sequence. Removes the sequence if no token remains. Returns
  // whether the sequence was removed.
  bool forget_first(SequenceId id) {
    Sequence& sequence = sequences_[id];
    const std::vector<Token>& tokens = sequence.tokens;
    const std::size_t end = std::min(tokens.size(), sequence.first + depth_);
    NodeId node = sequence.root;
    for (std::size_t at = sequence.first; at < end && !trie_[node].is_leaf(); ++at) {
      node = trie_.child(node, tokens[at]);
    }
    while (node != sequence.root) {
      const NodeId parent = trie_[node].parent;
      trie_[node].count > 1 ? trie_.count_down(node) : trie_.remove(node);
      node = parent;
    }
    if (++sequence.first < tokens.size()) return false;
    num_tokens_ -= tokens.size();
    sequence = {};
    free_.push_back(id);
    return true;
  }

  // The best draft of up to `most` tokens after the known ones. Each suffix of the known tokens
  // that is in the tree proposes its most frequent continuation. The one with the highest score is
  // used, or the longest suffix of equal ones. `own`: a sequence that ends with the known tokens,
  // or NO_SEQUENCE.
  Draft guess(NodeId root, SequenceId own, const Token* known, std::size_t num_known,
              std::size_t most, const DraftRules& rules) {
    Draft best, draft;
    for (std::size_t length = 1; length <= std::min(num_known, depth_ - 1); ++length) {
      const NodeId node = find(root, own, known + num_known - length, length);
      if (node == NO_NODE) break;
      const double allowed = double(length) * rules.max_spec_factor + 1e-6;
      follow(node, length, std::size_t(std::min(double(most), allowed)), rules, draft);
      if (draft.score >= best.score) std::swap(best, draft);
    }
    return best;
  }

 private:
  struct Sequence {
    NodeId root = NO_NODE;
    bool is_open = false;
    std::size_t first = 0;  // Index of the first token that was not removed.
    std::vector<Token> tokens;
    std::vector<NodeId> ends;  // Inner nodes of the last 1, 2, 3, ... tokens.
  };

  // Adds an occurrence of a node's string and one more token, `length` tokens together, at the end
  // of a sequence. Returns the inner node, or NO_NODE for a leaf of a string that did not occur
  // before.
  NodeId extend(NodeId node, Token token, SequenceId id, std::size_t length) {
    const NodeId child = trie_.child(node, token);
    if (child == NO_NODE) {
      trie_.add_leaf(node, token, id, std::uint32_t(sequences_[id].tokens.size() - length));
      return NO_NODE;
    }
    if (trie_[child].is_leaf()) open_leaf(child, length);
    trie_.count_up(child);
    return child;
  }

  // Converts a leaf whose string has `length` tokens to an inner node.
  void open_leaf(NodeId id, std::size_t length) {
    TrieNode& node = trie_[id];
    const SequenceId owner = node.sequence;
    Sequence& sequence = sequences_[owner];
    const std::uint32_t start = node.start;
    const std::size_t next = start + length;
    node.sequence = NO_SEQUENCE;
    node.first_child = NO_NODE;
    if (next < sequence.tokens.size()) {
      if (length < depth_) trie_.add_leaf(id, sequence.tokens[next], owner, start);
    } else if (sequence.is_open) {
      sequence.ends.push_back(id);
    }
  }

  // The inner node of a string, or a leaf in whose sequence the string occurs at the leaf's
  // position. NO_NODE if the string does not occur, or occurs only at the end of `own`.
  NodeId find(NodeId root, SequenceId own, const Token* tokens, std::size_t length) const {
    if (own != NO_SEQUENCE && length <= size(own)) {
      const std::vector<NodeId>& ends = sequences_[own].ends;
      return length <= ends.size() ? ends[length - 1] : NO_NODE;
    }
    NodeId node = root;
    for (std::size_t at = 0; at < length; ++at) {
      node = trie_.child(node, tokens[at]);
      if (node == NO_NODE || !trie_[node].is_leaf()) {
        if (node == NO_NODE) return NO_NODE;
        continue;
      }
      const std::vector<Token>& there = sequences_[trie_[node].sequence].tokens;
      const std::size_t start = trie_[node].start;
      if (there.size() - start < length) return NO_NODE;
      return std::equal(tokens, tokens + length, there.begin() + start) ? node : NO_NODE;
    }
    return node;
  }

  // The most frequent continuation of a string of `length` tokens.
  void follow(NodeId node, std::size_t length, std::size_t most, const DraftRules& rules,
              Draft& draft) {
    draft.score = 0;
    draft.tokens.clear();
    double probability = 1;
    for (; draft.tokens.size() < most && length < depth_; ++length) {
      if (!trie_[node].is_leaf()) {
        const NodeId child = trie_.favourite(node);
        if (child == NO_NODE) break;
        probability *= double(trie_[child].count) / trie_[node].count;
        if (probability < rules.min_token_prob) break;
        node = child;
        draft.tokens.push_back(trie_[child].token);
      } else {
        const std::vector<Token>& there = sequences_[trie_[node].sequence].tokens;
        const std::size_t next = trie_[node].start + length;
        if (next == there.size()) break;
        draft.tokens.push_back(there[next]);
      }
      draft.score += probability;
    }
  }

  std::size_t depth_;
  TokenTrie trie_;
  std::vector<Sequence> sequences_;
  std::vector<SequenceId> free_;
  std::vector<NodeId> ends_;
  std::size_t num_tokens_ = 0;
};

}  // namespace stepwell
