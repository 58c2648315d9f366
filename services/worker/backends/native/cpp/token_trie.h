// Nodes of tries over tokens, and the edges between them.
//
// The children of all nodes are in one hash table, by their parent and token. Memory of nodes comes
// in chunks, so that none is copied as their number grows.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace stepwell {

using Token = std::int32_t;
using NodeId = std::uint32_t;
using SequenceId = std::int32_t;

constexpr NodeId NO_NODE = 0;
constexpr SequenceId NO_SEQUENCE = -1;

// A string of tokens: that of its parent and one more. It occurs `count` times.
struct TrieNode {
  NodeId parent = NO_NODE;
  NodeId next = NO_NODE, previous = NO_NODE;  // Siblings.
  Token token = 0;
  std::uint32_t count = 0;
  SequenceId sequence = NO_SEQUENCE;  // Of a leaf: where its string occurs.
  union {
    NodeId first_child = NO_NODE;  // Of an inner node.
    std::uint32_t start;           // Of a leaf: where the string begins in the sequence.
  };
  NodeId favourite = NO_NODE;  // Of an inner node: the child that occurs most often, once found.

  bool is_leaf() const { return sequence != NO_SEQUENCE; }
};

// Where children are found: open addressing with linear probing, at most half full.
class TrieEdges {
 public:
  // With room for so many children; more make it grow.
  explicit TrieEdges(std::size_t num_children) { allocate(std::bit_ceil(2 * num_children + 2)); }

  // The slot of the child, or the free one where it would be. `has`: whether it is the child's.
  template <class Has>
  std::size_t find(NodeId parent, Token token, Has&& has) const {
    std::size_t at = slot(parent, token);
    while (slots_[at] != NO_NODE && !has(slots_[at])) at = (at + 1) & mask_;
    return at;
  }

  NodeId operator[](std::size_t at) const { return slots_[at]; }

  // Fills a free slot. `slot_of`: where the search for a node begins, see `slot`.
  template <class SlotOf>
  void fill(std::size_t at, NodeId id, SlotOf&& slot_of) {
    slots_[at] = id;
    if (2 * ++count_ <= mask_) return;
    const auto old = std::move(slots_);
    const std::size_t size = mask_ + 1;
    allocate(2 * size);
    for (std::size_t i = 0; i < size; ++i) {
      if (old[i] == NO_NODE) continue;
      std::size_t to = slot_of(old[i]);
      while (slots_[to] != NO_NODE) to = (to + 1) & mask_;
      slots_[to] = old[i];
    }
  }

  // Frees a slot, and moves later ones up that a search would miss.
  template <class SlotOf>
  void free(std::size_t at, SlotOf&& slot_of) {
    --count_;
    for (std::size_t next = (at + 1) & mask_; slots_[next] != NO_NODE; next = (next + 1) & mask_) {
      const std::size_t wanted = slot_of(slots_[next]);
      if (((next - wanted) & mask_) < ((next - at) & mask_)) continue;
      slots_[at] = slots_[next];
      at = next;
    }
    slots_[at] = NO_NODE;
  }

  std::size_t slot(NodeId parent, Token token) const {
    const std::uint64_t key = std::uint64_t(parent) << 32 | std::uint32_t(token);
    return std::size_t((key ^ key >> 29) * 0x9E3779B97F4A7C15u >> 32) & mask_;
  }

 private:
  struct Free {
    void operator()(NodeId* slots) const { std::free(slots); }
  };

  // Pages of zeros, which take memory when they are first written.
  void allocate(std::size_t size) {
    slots_.reset(static_cast<NodeId*>(std::calloc(size, sizeof(NodeId))));
    if (!slots_) throw std::bad_alloc();
    mask_ = size - 1;
  }

  std::unique_ptr<NodeId[], Free> slots_;
  std::size_t mask_ = 0, count_ = 0;
};

// Tries with counts. Of children that occur as often, the favourite is the one of the lowest token.
class TokenTrie {
 public:
  // What a node takes: itself, and its share of the edges.
  static constexpr std::size_t NODE_BYTES = sizeof(TrieNode) + 2 * sizeof(NodeId);

  explicit TokenTrie(std::size_t num_nodes) : edges_(num_nodes) {}

  TrieNode& operator[](NodeId id) { return chunks_[id / CHUNK][id % CHUNK]; }
  const TrieNode& operator[](NodeId id) const { return chunks_[id / CHUNK][id % CHUNK]; }

  std::size_t bytes() const { return num_nodes_ * NODE_BYTES; }

  // The node of an empty string.
  NodeId add_root() { return take({}); }

  // NO_NODE if there is none.
  NodeId child(NodeId parent, Token token) const { return edges_[find(parent, token)]; }

  // A leaf that does not exist yet. Its parent is an inner node.
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
    edges_.fill(find(parent, token), id, [this](NodeId of) { return slot_of(of); });
    return id;
  }

  // Removes a node without children.
  void remove(NodeId id) {
    const TrieNode& node = (*this)[id];
    if (node.parent != NO_NODE) {
      TrieNode& above = (*this)[node.parent];
      edges_.free(find(node.parent, node.token), [this](NodeId of) { return slot_of(of); });
      (node.previous == NO_NODE ? above.first_child : (*this)[node.previous].next) = node.next;
      if (node.next != NO_NODE) (*this)[node.next].previous = node.previous;
      if (above.favourite == id) above.favourite = NO_NODE;
    }
    free_.push_back(id);
    --num_nodes_;
  }

  // The string of a node occurs once more.
  void count_up(NodeId id) {
    TrieNode& node = (*this)[id];
    ++node.count;
    prefer((*this)[node.parent], id);
  }

  // It occurs once less, and still does.
  void count_down(NodeId id) {
    TrieNode& node = (*this)[id];
    --node.count;
    TrieNode& above = (*this)[node.parent];
    if (above.favourite == id) above.favourite = NO_NODE;
  }

  // The child of an inner node that occurs most often; NO_NODE if it has none.
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

  // Makes a child the favourite, if there is a known one that it is to be preferred to.
  void prefer(TrieNode& above, NodeId id) {
    if (above.favourite == NO_NODE) return;
    const TrieNode &one = (*this)[id], &other = (*this)[above.favourite];
    const bool ties = one.count == other.count;
    if (ties ? one.token < other.token : one.count > other.count) above.favourite = id;
  }

  std::size_t find(NodeId parent, Token token) const {
    return edges_.find(parent, token, [&](NodeId id) {
      const TrieNode& node = (*this)[id];
      return node.parent == parent && node.token == token;
    });
  }

  std::size_t slot_of(NodeId id) const {
    const TrieNode& node = (*this)[id];
    return edges_.slot(node.parent, node.token);
  }

  TrieEdges edges_;
  std::vector<std::unique_ptr<TrieNode[]>> chunks_;
  std::vector<NodeId> free_;
  std::size_t num_nodes_ = 0;
};

}  // namespace stepwell
