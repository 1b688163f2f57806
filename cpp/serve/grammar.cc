// Grammars by llguidance: a model's tokens in the library, and its matchers as constraints.
#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "helm/constraint.h"
#include "serve/llguidance.h"

namespace helm {
namespace {

using llguidance::Library;
using llguidance::Matcher;

// Texts that a grammar forces recur in every request.
class TokenizedTexts {
 public:
  explicit TokenizedTexts(const GrammarTokens& tokens)
      : tokenize_(tokens.tokenize), bytes_(tokens.bytes) {
    for (size_t id = 0; id < bytes_.size(); ++id) {
      if (bytes_[id].empty() || tokens.special[id]) continue;
      ids_.emplace(bytes_[id], static_cast<int32_t>(id));
      longest_ = std::max(longest_, bytes_[id].size());
    }
  }

  std::vector<int32_t> operator()(std::string_view text) {
    const std::lock_guard lock(mutex_);
    const auto [found, added] = known_.try_emplace(std::string(text));
    if (added) {
      try {
        found->second = tokenize_(text);
        if (!spells(found->second, text)) found->second = greedy(text);
      } catch (...) {  // no answer: any split into tokens is right
        found->second = greedy(text);
      }
    }
    std::vector<int32_t> tokens = found->second;
    if (known_.size() > kMost) known_.clear();
    return tokens;
  }

 private:
  static constexpr size_t kMost = 4096;

  bool spells(const std::vector<int32_t>& tokens, std::string_view text) const {
    for (const int32_t id : tokens) {
      if (id < 0 || static_cast<size_t>(id) >= bytes_.size()) return false;
      const std::string& piece = bytes_[static_cast<size_t>(id)];
      if (piece.empty() || !text.starts_with(piece)) return false;
      text.remove_prefix(piece.size());
    }
    return text.empty();
  }

  // The longest token that fits, again and again; up to bytes that no token has.
  std::vector<int32_t> greedy(std::string_view text) const {
    std::vector<int32_t> tokens;
    while (!text.empty()) {
      size_t length = std::min(longest_, text.size());
      while (length > 0 && ids_.count(text.substr(0, length)) == 0) --length;
      if (length == 0) break;
      tokens.push_back(ids_.at(text.substr(0, length)));
      text.remove_prefix(length);
    }
    return tokens;
  }

  std::function<std::vector<int32_t>(std::string_view)> tokenize_;
  std::vector<std::string> bytes_;
  std::unordered_map<std::string_view, int32_t> ids_;  // of bytes_
  size_t longest_ = 0;
  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<int32_t>> known_;
};

size_t tokenize(const void* user, const uint8_t* text, size_t bytes, uint32_t* tokens,
                size_t room) {
  // The library unwinds no exceptions.
  try {
    auto& texts = *static_cast<TokenizedTexts*>(const_cast<void*>(user));
    const std::vector<int32_t> found = texts({reinterpret_cast<const char*>(text), bytes});
    std::copy_n(found.begin(), std::min(room, found.size()), tokens);
    return found.size();
  } catch (...) {
    return 0;
  }
}

std::string reason(const Library& library, Matcher* matcher) {
  const char* const said = library.error(matcher);
  std::string text = said == nullptr ? "no reason given" : said;
  constexpr size_t kMost = 500;
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

// A model's tokens in the library; what is made of it keeps it.
class Vocabulary {
 public:
  Vocabulary(const std::string& path, const GrammarTokens& tokens)
      : library(llguidance::open_llguidance(path)), version(library.version()), ends(tokens.ends) {
    check(tokens);
    vocab_size = static_cast<int64_t>(tokens.bytes.size());
    constexpr char kSpecial = '\xff';  // begins no text: llguidance's mark of special tokens
    std::vector<uint32_t> lengths;
    std::string bytes;
    for (size_t id = 0; id < tokens.bytes.size(); ++id) {
      const size_t before = bytes.size();
      if (tokens.special[id]) {
        bytes.append(1, kSpecial).append("<").append(std::to_string(id)).append(">");
      } else {
        bytes += tokens.bytes[id];
      }
      lengths.push_back(static_cast<uint32_t>(bytes.size() - before));
    }
    if (tokens.tokenize) texts = std::make_unique<TokenizedTexts>(tokens);
    const std::vector<uint32_t> others(ends.begin() + 1, ends.end());
    llguidance::TokenizerOptions options{};
    options.struct_size = sizeof(options);
    options.vocab_size = static_cast<uint32_t>(vocab_size);
    options.tok_eos = static_cast<uint32_t>(ends.front());
    options.token_lens = lengths.data();
    options.token_bytes = reinterpret_cast<const uint8_t*>(bytes.data());
    options.tokenize_assumes_string = texts != nullptr;
    options.tokenize_fn = texts == nullptr ? nullptr : tokenize;
    options.tokenize_user_data = texts.get();
    options.use_approximate_greedy_tokenize_fn = texts == nullptr;
    options.tok_eos_extra = others.data();
    options.tok_eos_extra_count = static_cast<uint32_t>(others.size());
    std::array<char, 1024> error{};
    tokenizer = library.new_tokenizer(&options, error.data(), error.size());
    if (tokenizer == nullptr) {
      fail(ErrorKind::kInvalid, "[grammar] llguidance refuses the tokens: ", error.data());
    }
  }
  ~Vocabulary() { library.free_tokenizer(tokenizer); }
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  const Library& library;
  const std::string version;
  const std::vector<int32_t> ends;
  int64_t vocab_size = 0;
  std::unique_ptr<TokenizedTexts> texts;  // null: nothing is forced
  llguidance::Tokenizer* tokenizer = nullptr;

 private:
  static void check(const GrammarTokens& tokens) {
    const auto size = static_cast<int64_t>(tokens.bytes.size());
    if (size == 0 || size > INT32_MAX || tokens.special.size() != tokens.bytes.size()) {
      fail(ErrorKind::kInvalid, "[grammar] ", size, " tokens and ", tokens.special.size(),
           " marks of special ones were given; expected as many of both, at least one");
    }
    if (tokens.ends.empty()) {
      fail(ErrorKind::kInvalid,
           "[grammar] the model has no end-of-sequence token, with which a text could end");
    }
    for (const int32_t id : tokens.ends) {
      if (id < 0 || id >= size) {
        fail(ErrorKind::kInvalid, "[grammar] end-of-sequence token ", id,
             " lies outside the vocabulary of ", size);
      }
    }
  }
};

class MatcherConstraint final : public TokenConstraint {
 public:
  MatcherConstraint(std::shared_ptr<const Vocabulary> vocabulary, Matcher* matcher)
      : vocabulary_(std::move(vocabulary)), matcher_(matcher) {}
  ~MatcherConstraint() override { vocabulary_->library.free_matcher(matcher_); }

  // A matcher that has found no more to say allows the end alone, or nothing.
  void mask(std::span<uint32_t> allowed) override {
    std::fill(allowed.begin(), allowed.end(), 0);
    if (stopped_) return;
    const auto words = static_cast<size_t>((vocabulary_->vocab_size + 31) / 32);
    if (allowed.size() < words) {
      fail(ErrorKind::kInvalid, "[grammar] a mask has ", allowed.size(), " words, the grammar's ",
           vocabulary_->vocab_size, " tokens need ", words);
    }
    check(vocabulary_->library.mask(matcher_, allowed.data(), words * sizeof(uint32_t)));
  }

  void commit(int32_t token) override {
    const bool end = std::find(vocabulary_->ends.begin(), vocabulary_->ends.end(), token) !=
                     vocabulary_->ends.end();
    if (!end || !vocabulary_->library.is_stopped(matcher_)) {
      check(vocabulary_->library.consume(matcher_, static_cast<uint32_t>(token)));
    }
    stopped_ = stopped_ || end;
  }

  std::vector<int32_t> forced() override {
    if (stopped_) return {};
    if (const char* error = vocabulary_->library.error(matcher_)) raise(error);
    if (vocabulary_->library.is_stopped(matcher_)) return {vocabulary_->ends.front()};
    if (vocabulary_->texts == nullptr) return {};
    std::array<uint32_t, 64> tokens;
    const int32_t count = vocabulary_->library.forced(matcher_, tokens.data(), tokens.size());
    check(count < 0 ? -1 : 0);
    return {tokens.begin(), tokens.begin() + count};
  }

  bool is_stopped() const override { return stopped_; }

 private:
  void check(int32_t status) {
    if (status < 0) raise(reason(vocabulary_->library, matcher_));
  }
  [[noreturn]] static void raise(const std::string& why) {
    fail(ErrorKind::kInvalid, "[grammar] the text cannot go on: ", why);
  }

  std::shared_ptr<const Vocabulary> vocabulary_;
  Matcher* matcher_;
  bool stopped_ = false;
};

class MatcherGrammar final : public Grammar {
 public:
  MatcherGrammar(std::shared_ptr<const Vocabulary> vocabulary, Matcher* matcher)
      : vocabulary_(std::move(vocabulary)), matcher_(matcher) {}
  ~MatcherGrammar() override { vocabulary_->library.free_matcher(matcher_); }

  std::shared_ptr<TokenConstraint> start() const override {
    const std::lock_guard lock(mutex_);
    return std::make_shared<MatcherConstraint>(vocabulary_,
                                               vocabulary_->library.clone_matcher(matcher_));
  }

 private:
  std::shared_ptr<const Vocabulary> vocabulary_;
  Matcher* matcher_;  // at the beginning
  mutable std::mutex mutex_;
};

}  // namespace

class GrammarCompiler::Impl {
 public:
  std::shared_ptr<const Vocabulary> vocabulary;
};

GrammarCompiler::GrammarCompiler(const std::string& library, const GrammarTokens& tokens)
    : impl_(new Impl{std::make_shared<const Vocabulary>(library, tokens)}) {}
GrammarCompiler::~GrammarCompiler() = default;

const std::string& GrammarCompiler::version() const {
  return impl_->vocabulary->version;
}

std::shared_ptr<Grammar> GrammarCompiler::compile(const std::string& kind, const std::string& text,
                                                  const GrammarLimits& limits) const {
  if (text.find('\0') != std::string::npos) {
    fail(ErrorKind::kInvalid, "[grammar] the ", kind, " has a zero character; leave it out");
  }
  const Library& library = impl_->vocabulary->library;
  llguidance::MatcherOptions options{};
  library.set_defaults(&options, impl_->vocabulary->tokenizer);
  options.log_buffer_level = options.log_stderr_level = 0;
  options.ff_tokens_ok = impl_->vocabulary->texts != nullptr;
  options.limits.verbose_errors = false;
  const auto limit = [](auto& own, uint64_t wanted) {
    if (wanted > 0) own = wanted;
  };
  limit(options.limits.initial_lexer_fuel, limits.lexer_fuel);
  limit(options.limits.step_lexer_fuel, limits.mask_fuel);
  limit(options.limits.step_max_items, limits.mask_items);
  limit(options.limits.max_lexer_states, limits.lexer_states);
  limit(options.limits.max_grammar_size, limits.grammar_size);
  Matcher* const matcher = library.new_matcher(&options, kind.c_str(), text.c_str());
  auto grammar = std::make_shared<MatcherGrammar>(impl_->vocabulary, matcher);
  if (library.error(matcher) != nullptr) {
    fail(ErrorKind::kInvalid, "[grammar] this ", kind,
         " cannot be used: ", reason(library, matcher));
  }
  return grammar;
}

}  // namespace helm
