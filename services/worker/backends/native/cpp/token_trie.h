// Nodes of tries over tokens, and the edges between them.
//
// The children of all nodes are in one hash table, by their parent and token. Memory of nodes and
// of the table is allocated in chunks, so that nothing is copied as they grow.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace stepwell {

using Token = std::int32_t;
using NodeId = std::uint32_t;
using SequenceId = std::int32_t;

constexpr NodeId NO_NODE = 0;
constexpr SequenceId NO_SEQUENCE = -1;

// A string of tokens: its parent's string and one more token. It occurs `count` times.
struct TrieNode {
  NodeId parent = NO_NODE;
  NodeId next = NO_NODE, previous = NO_NODE;  // Siblings.
  NodeId chained = NO_NODE;                   // The next node in its bucket.
  Token token = 0;
  std::uint32_t count = 0;
  SequenceId sequence = NO_SEQUENCE;  // Leaf: the sequence with its string.
  union {
    NodeId first_child = NO_NODE;  // Inner node.
    std::uint32_t start;           // Leaf: index of the string in the sequence.
  };
  NodeId favourite = NO_NODE;  // Inner node: its most frequent child, once determined.

  bool is_leaf() const { return sequence != NO_SEQUENCE; }
};

// A hash table of children, with linear hashing (Litwin, 1980). Each bucket has a chain of nodes.
// Each added child may add one bucket, to which children of one other bucket are moved. Therefore
// no call moves many nodes, and memory grows with the number of children.
class TrieBuckets {
 public:
  TrieBuckets() { add_chunk(); }

  std::size_t size() const { return level_ + num_split_; }

  // The first node of the child's bucket.
  NodeId& of(NodeId parent, Token token) { return (*this)[number(parent, token)]; }
  NodeId of(NodeId parent, Token token) const {
    const std::size_t at = number(parent, token);
    return chunks_[at / CHUNK][at % CHUNK];
  }

  // Adds a bucket. Empties the bucket from which it is split, and returns the first node of that
  // bucket's chain, whose nodes must all be added again.
  NodeId split() {
    if (size() == chunks_.size() * CHUNK) add_chunk();
    const NodeId first = std::exchange((*this)[num_split_], NO_NODE);
    if (++num_split_ == level_) {
      level_ *= 2;
      num_split_ = 0;
    }
    return first;
  }

 private:
  static constexpr std::size_t CHUNK = 1024;

  NodeId& operator[](std::size_t at) { return chunks_[at / CHUNK][at % CHUNK]; }

  void add_chunk() { chunks_.emplace_back(new NodeId[CHUNK]()); }

  std::size_t number(NodeId parent, Token token) const {
    const std::uint64_t key = std::uint64_t(parent) << 32 | std::uint32_t(token);
    const std::size_t hash = (key ^ key >> 29) * 0x9E3779B97F4A7C15u >> 32;
    const std::size_t at = hash & (2 * level_ - 1);
    return at < size() ? at : at - level_;
  }

  std::vector<std::unique_ptr<NodeId[]>> chunks_;
  std::size_t level_ = CHUNK;  // A power of two.
  std::size_t num_split_ = 0;  // Number of split buckets among the first `level_`.
};

// Tries with counts. The favourite of a node is its most frequent child, the one with the lowest
// token among equals.
class TokenTrie {
 public:
  // Bytes of a node and its bucket.
  static constexpr std::size_t NODE_BYTES = sizeof(TrieNode) + sizeof(NodeId);

  TrieNode& operator[](NodeId id) { return chunks_[id / CHUNK][id % CHUNK]; }
  const TrieNode& operator[](NodeId id) const { return chunks_[id / CHUNK][id % CHUNK]; }

  std::size_t bytes() const { return num_nodes_ * NODE_BYTES; }

  // The node of an empty string.
  NodeId add_root() { return take({}); }

  // The child of a parent for a token, or NO_NODE if there is none.
  NodeId child(NodeId parent, Token token) const {
    NodeId id = buckets_.of(parent, token);
    while (id != NO_NODE && !is_child(id, parent, token)) id = (*this)[id].chained;
    return id;
  }

  // Adds a leaf that does not exist yet. Its parent must be an inner node.
  NodeId add_leaf(NodeId parent, Token token, SequenceId sequence, std::uint32_t start) {
    TrieNode& above = (*this)[parent];
    const NodeId id = take({.parent = parent,
                            .next = above.first_child,
                            .token = token,
                            .count = 1,
                            .sequence = sequence,
                            .start = start});
    if (above.first_child == NO_NODE) {
      above.favourite = id;
    } else {
      (*this)[above.first_child].previous = id;
    }
    above.first_child = id;
    prefer(above, id);
    chain(id);
    if (++num_children_ > buckets_.size()) add_bucket();
    return id;
  }

  // Removes a node without children.
  void remove(NodeId id) {
    const TrieNode& node = (*this)[id];
    if (node.parent != NO_NODE) {
      TrieNode& above = (*this)[node.parent];
      unchain(id);
      (node.previous == NO_NODE ? above.first_child : (*this)[node.previous].next) = node.next;
      if (node.next != NO_NODE) (*this)[node.next].previous = node.previous;
      if (above.favourite == id) above.favourite = NO_NODE;
    }
    free_.push_back(id);
    --num_nodes_;
  }

  // Counts one more occurrence of a node's string.
  void count_up(NodeId id) {
    TrieNode& node = (*this)[id];
    ++node.count;
    prefer((*this)[node.parent], id);
  }

  // Counts one occurrence less. At least one must remain.
  void count_down(NodeId id) {
    TrieNode& node = (*this)[id];
    --node.count;
    TrieNode& above = (*this)[node.parent];
    if (above.favourite == id) above.favourite = NO_NODE;
  }

  // The most frequent child of an inner node; NO_NODE if it has none.
  NodeId favourite(NodeId id) {
    TrieNode& node = (*this)[id];
    if (node.favourite == NO_NODE) {
      node.favourite = node.first_child;
      for (NodeId one = node.first_child; one != NO_NODE; one = (*this)[one].next) {
        prefer(node, one);
      }
    }
    return node.favourite;
  }

 private:
  static constexpr std::size_t CHUNK = 1024;

  NodeId take(const TrieNode& node) {
    if (free_.empty()) {
      const NodeId first = NodeId(chunks_.size() * CHUNK);
      chunks_.emplace_back(new TrieNode[CHUNK]);
      for (NodeId i = CHUNK; i-- > 0;) {
        if (first + i != NO_NODE) free_.push_back(first + i);
      }
    }
    const NodeId id = free_.back();
    free_.pop_back();
    (*this)[id] = node;
    ++num_nodes_;
    return id;
  }

  // Makes a child the favourite of its parent if the known favourite ranks below it.
  void prefer(TrieNode& above, NodeId id) {
    if (above.favourite == NO_NODE) return;
    const TrieNode &one = (*this)[id], &other = (*this)[above.favourite];
    const bool ties = one.count == other.count;
    if (ties ? one.token < other.token : one.count > other.count) above.favourite = id;
  }

  bool is_child(NodeId id, NodeId parent, Token token) const {
    const TrieNode& node = (*this)[id];
    return node.parent == parent && node.token == token;
  }

  void chain(NodeId id) {
    TrieNode& node = (*this)[id];
    node.chained = std::exchange(buckets_.of(node.parent, node.token), id);
  }

  void unchain(NodeId id) {
    const TrieNode& node = (*this)[id];
    NodeId* link = &buckets_.of(node.parent, node.token);
    while (*link != id) link = &(*this)[*link].chained;
    *link = node.chained;
    --num_children_;
  }

  void add_bucket() {
    for (NodeId id = buckets_.split(); id != NO_NODE;) {
      const NodeId next = (*this)[id].chained;
      chain(id);
      id = next;
    }
  }

  TrieBuckets buckets_;
  std::size_t num_children_ = 0;  // Number of nodes in buckets.
  std::vector<std::unique_ptr<TrieNode[]>> chunks_;
  std::vector<NodeId> free_;
  std::size_t num_nodes_ = 0;
};

}  // namespace stepwell
