// The part of llguidance's C interface that HELM calls, found in its shared library when it runs.
// The layouts are those of versions 1.7 to 1.9; open_llguidance() checks what it can of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace helm::llguidance {

struct Tokenizer;  // the library's own
struct Matcher;

struct Limits {
  size_t max_items_in_row;
  uint64_t initial_lexer_fuel;
  uint64_t step_lexer_fuel;
  size_t step_max_items;
  size_t max_lexer_states;
  size_t max_grammar_size;
  bool precompute_large_lexemes;
  bool verbose_errors;
};

struct MatcherOptions {
  const Tokenizer* tokenizer;
  uint32_t log_buffer_level;
  uint32_t log_stderr_level;
  bool ff_tokens_ok;
  bool backtrack_ok;
  Limits limits;
  uint64_t later[32];  // zeros, for fields that later versions may add
};

using TokenizeText = size_t(const void* user, const uint8_t* text, size_t bytes, uint32_t* tokens,
                            size_t room);

struct TokenizerOptions {
  size_t struct_size;  // how much of it there is
  uint32_t vocab_size;
  uint32_t tok_eos;
  const uint32_t* token_lens;  // [vocab_size]
  const uint8_t* token_bytes;  // of all, one after the other
  const char* tokenizer_json;
  bool tokenize_assumes_string;
  TokenizeText* tokenize_fn;
  bool use_approximate_greedy_tokenize_fn;
  const void* tokenize_user_data;
  const char* const* slices;
  const uint32_t* tok_eos_extra;
  uint32_t tok_eos_extra_count;
};

// Calls that can fail return -1, and the matcher's error says why.
struct Library {
  const char* (*version)();
  void (*set_defaults)(MatcherOptions*, const Tokenizer*);
  Tokenizer* (*new_tokenizer)(const TokenizerOptions*, char* error, size_t error_bytes);
  void (*free_tokenizer)(Tokenizer*);
  Matcher* (*new_matcher)(const MatcherOptions*, const char* kind, const char* text);
  Matcher* (*clone_matcher)(const Matcher*);
  void (*free_matcher)(Matcher*);
  const char* (*error)(Matcher*);
  int32_t (*mask)(Matcher*, uint32_t* allowed, size_t bytes);
  size_t (*mask_bytes)(const Matcher*);
  int32_t (*consume)(Matcher*, uint32_t token);
  int32_t (*forced)(Matcher*, uint32_t* tokens, size_t room);
  bool (*is_stopped)(const Matcher*);
};

// The library stays loaded for good. Throws Error{kAbsent} where it cannot be loaded, lacks one of
// these or is of a version whose layouts are not known.
const Library& open_llguidance(const std::string& path);

}  // namespace helm::llguidance
