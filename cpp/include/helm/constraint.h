// What a request's tokens must obey, and grammars that say it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "helm/types.h"

namespace helm {

// Decides, token by token, what a request may generate. One object serves one request; its calls
// do not overlap, but come from any of the engine's threads. All may throw Error: the request then
// ends with Finish::kError and that reason.
class HELM_API TokenConstraint {
 public:
  virtual ~TokenConstraint();

  // Sets bit i % 32 of allowed[i / 32] for each token i that may come next, and clears all others;
  // allowed: [ceil(vocab_size / 32)]. The end-of-sequence tokens are allowed only where the text
  // may end.
  virtual void mask(std::span<uint32_t> allowed) = 0;
  // The token that was chosen.
  virtual void commit(int32_t token) = 0;
  // The tokens that must follow, none if there is a choice; they are committed by the caller.
  virtual std::vector<int32_t> forced() = 0;
  // Whether an end-of-sequence token was committed: nothing may follow.
  virtual bool is_stopped() const = 0;
};

// A model's tokens, as grammars see them.
struct GrammarTokens {
  std::vector<std::string> bytes;  // [vocab_size]; empty: the token never occurs in text
  std::vector<bool> special;       // [vocab_size]; such a token is no text whatever its bytes
  std::vector<int32_t> ends;       // end-of-sequence tokens, at least one; the first is forced
  // The model's own tokens of a text, from any thread; may be empty: nothing is forced then, and
  // any split of the text into tokens is allowed.
  std::function<std::vector<int32_t>(std::string_view)> tokenize;
};

// The most that a grammar may take; 0: llguidance's own limit.
struct GrammarLimits {
  uint64_t lexer_fuel = 0;    // to build the lexer; 50,000 take about a millisecond
  uint64_t mask_fuel = 0;     // of the lexer, for a mask; 14,000 take about a millisecond
  uint64_t mask_items = 0;    // of the parser, for a mask; 20,000 take about a millisecond
  uint64_t lexer_states = 0;  // of 1 to 2 kB
  uint64_t grammar_size = 0;  // symbols
};

// A compiled grammar, which constrains any number of requests at once.
class HELM_API Grammar {
 public:
  virtual ~Grammar();
  virtual std::shared_ptr<TokenConstraint> start() const = 0;
};

// Compiles grammars for one model with the library llguidance, found at `library`, a path. Safe to
// use from several threads.
class HELM_API GrammarCompiler {
 public:
  // Throws Error{kAbsent} where the library cannot be loaded, lacks a function or is of another
  // version than those known, kInvalid for tokens that it refuses.
  GrammarCompiler(const std::string& library, const GrammarTokens& tokens);
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // kind: "json_schema", "regex" or "lark". Throws kInvalid with the reason for a text that is
  // none or takes more than the limits.
  std::shared_ptr<Grammar> compile(const std::string& kind, const std::string& text,
                                   const GrammarLimits& limits = {}) const;
  const std::string& version() const;  // of the library

 private:
  class HELM_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
