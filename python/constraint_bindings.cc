// Constraints and grammars in the Python module, and constraints that Python computes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "helm/constraint.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

template <typename Call>
void call_python(const Call& call) {
  call_from_engine("[grammar] ", call);
}

// A constraint that an object of Python computes; it has the methods of TokenConstraint, and
// mask() gives the words of the mask as bytes.
class CalledConstraint final : public TokenConstraint {
 public:
  explicit CalledConstraint(nb::object object) : object_(shared_object(std::move(object))) {}

  void mask(std::span<uint32_t> allowed) override {
    call_python([&] {
      const auto words = nb::cast<nb::bytes>(object_->attr("mask")());
      std::fill(allowed.begin(), allowed.end(), 0);
      std::memcpy(allowed.data(), words.data(), std::min(words.size(), allowed.size_bytes()));
    });
  }
  void commit(int32_t token) override {
    call_python([&] {
      object_->attr("commit")(token);
      stopped_ = nb::cast<bool>(object_->attr("is_stopped")());
    });
  }
  std::vector<int32_t> forced() override {
    std::vector<int32_t> tokens;
    call_python([&] { tokens = nb::cast<std::vector<int32_t>>(object_->attr("forced")()); });
    return tokens;
  }
  bool is_stopped() const override { return stopped_; }

 private:
  std::shared_ptr<nb::object> object_;
  bool stopped_ = false;
};

using Tokenize = std::optional<nb::typed<nb::callable, std::vector<int32_t>(nb::bytes)>>;

std::function<std::vector<int32_t>(std::string_view)> tokenizing(const Tokenize& tokenize) {
  if (!tokenize) return {};
  return [call = shared_object(nb::object(*tokenize))](std::string_view text) {
    std::vector<int32_t> tokens;
    call_python([&] {
      tokens = nb::cast<std::vector<int32_t>>((*call)(nb::bytes(text.data(), text.size())));
    });
    return tokens;
  };
}

GrammarTokens tokens_of(const std::vector<nb::bytes>& bytes, const std::vector<int32_t>& special,
                        std::vector<int32_t> ends, const Tokenize& tokenize) {
  GrammarTokens tokens;
  for (const nb::bytes& piece : bytes) tokens.bytes.emplace_back(piece.c_str(), piece.size());
  tokens.special.resize(bytes.size(), false);
  for (const int32_t id : special) tokens.special.at(static_cast<size_t>(id)) = true;
  tokens.ends = std::move(ends);
  tokens.tokenize = tokenizing(tokenize);
  return tokens;
}

nb::bytes mask_of(TokenConstraint& constraint, int64_t vocab_size) {
  std::vector<uint32_t> words(static_cast<size_t>((vocab_size + 31) / 32));
  {
    const Released released;
    constraint.mask(words);
  }
  return nb::bytes(words.data(), words.size() * sizeof(uint32_t));
}

}  // namespace

void bind_constraint(nb::module_& m) {
  nb::class_<TokenConstraint>(m, "TokenConstraint",
                              "What the tokens of one request must obey; its calls must not\n"
                              "overlap.")
      .def("mask", &mask_of, "vocab_size"_a,
           "Which tokens may come next: bit i % 32 of little-endian word i // 32.")
      .def(
          "commit",
          [](TokenConstraint& constraint, int32_t token) {
            const Released released;
            constraint.commit(token);
          },
          "token"_a, "Takes the token that was chosen.")
      .def(
          "forced",
          [](TokenConstraint& constraint) {
            const Released released;
            return constraint.forced();
          },
          "Tokens that must follow.")
      .def("is_stopped", &TokenConstraint::is_stopped, "Whether nothing may follow.");
  nb::class_<CalledConstraint, TokenConstraint>(
      m, "CalledConstraint", "One that a Python object computes, by methods of the same names.")
      .def(nb::init<nb::object>(), "object"_a);
  nb::class_<Grammar>(m, "Grammar", "A compiled grammar.")
      .def("start", &Grammar::start, "A constraint for one request.");
  nb::class_<GrammarCompiler>(m, "GrammarCompiler", "llguidance, called without Python.")
      .def(
          "__init__",
          [](GrammarCompiler* self, const std::string& library, const std::vector<nb::bytes>& bytes,
             const std::vector<int32_t>& special, std::vector<int32_t> ends,
             const Tokenize& tokenize) {
            const GrammarTokens tokens = tokens_of(bytes, special, std::move(ends), tokenize);
            const Released released;
            new (self) GrammarCompiler(library, tokens);
          },
          "library"_a, "bytes"_a, "special"_a, "ends"_a, "tokenize"_a.none() = nb::none(),
          "library: llguidance's shared library. bytes: of each token. special: ids of tokens\n"
          "that are no text. ends: end-of-sequence tokens. tokenize: a text's tokens.")
      .def(
          "compile",
          [](const GrammarCompiler& self, const std::string& kind, const std::string& text,
             uint64_t lexer_fuel, uint64_t grammar_size) {
            const Released released;
            return self.compile(kind, text,
                                {.lexer_fuel = lexer_fuel, .grammar_size = grammar_size});
          },
          "kind"_a, "text"_a, "lexer_fuel"_a = 0, "grammar_size"_a = 0,
          "A Grammar of a \"json_schema\", \"regex\" or \"lark\".")
      .def_prop_ro("version", &GrammarCompiler::version);
}

}  // namespace helm
