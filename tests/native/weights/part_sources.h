// A matrix as checkpoints of every kind store it, in files of random but finite weights.
#pragma once

#include <cstring>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helm/encode.h"
#include "helm/plan.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {

inline constexpr int64_t kRows = 96, kCols = 768;
inline constexpr const char* kName = "w";

// Random bytes; of each pair the second keeps a small exponent where it is one of a scale.
inline std::string noise(int64_t bytes, unsigned odd, unsigned even, uint32_t seed) {
  std::mt19937 rng(seed);
  std::string made(static_cast<size_t>(bytes), '\0');
  for (size_t i = 0; i < made.size(); ++i)
    made[i] = static_cast<char>(rng() & (i % 2 ? odd : even));
  return made;
}

inline StoredWeights stored_as(const char* stored) {
  StoredWeights weights;
  weights.name = kName, weights.stored = stored, weights.rows = kRows, weights.cols = kCols;
  return weights;
}

struct Source {  // of a matrix, in a file of the folder
  std::string what;
  TensorSource source;
  std::vector<std::string> formats;
};

class Sources {
 public:
  explicit Sources(std::string folder) : folder_(std::move(folder)) {}

  Source dense(Stored stored) {
    const int64_t bytes = stored_bytes(stored, kCols), even = kRows / 2;
    const auto values = encode(dtype_of(stored), random_floats(kRows * kCols, 3));
    const std::string content(values.begin(), values.end());
    Source made{stored_name(stored), {stored, {}, {}}, {"f32", "f16", "bf16", "c8.s32", "c4.km32"}};
    if (stored == Stored::kBF16) made.formats.back() = "bf16c";
    const std::string file = write(made.what, "123" + content);
    for (const int64_t i : {0, 1}) {  // every other row, then those between
      made.source.extents.push_back({file, 3 + i * bytes, even, 2 * bytes});
    }
    return made;
  }

  Source blocks(Stored stored) {
    const unsigned mask = stored == Stored::kMXFP4 ? 0x83 : 0xa3;
    const int64_t bytes = kRows * stored_bytes(stored, kCols);
    Source made{stored_name(stored),
                {stored, {}, {}},
                {format_name(row_of(stored).exact), "f32", "bf16", "c8.s32"}};
    const std::string file = write(made.what, noise(bytes, mask, mask, 5));
    made.source.extents.push_back({file, 0, kRows, 0});
    return made;
  }

  Source strips(Stored stored) {
    const auto values = random_floats(kRows * kCols, 7);
    StoredWeights weights = stored_as("f32");
    weights.pieces["weight"] = {"u8", {kRows, kCols * 4}, std::as_bytes(std::span(values))};
    const Format& format = row_of(stored).exact;
    std::string content(static_cast<size_t>(format_bytes(format, kRows, kCols)), '\0');
    std::vector<std::byte> own(content.size());
    encode_weights(weights, format, own);
    std::memcpy(content.data(), own.data(), own.size());
    Source made{stored_name(stored), {stored, {}, {}}, {format_name(format), "f32", "bf16"}};
    made.source.extents.push_back({write(made.what, std::string(64, '.') + content), 64, kRows, 0});
    return made;
  }

  struct Piece {
    const char* name;
    const char* dtype;
    std::vector<int64_t> shape;
    unsigned odd, even;  // bits that bytes may have
  };
  Source pieces(Stored stored, const std::vector<Piece>& all) {
    Source made{stored_name(stored), {stored, {}, {}}, {"f32", "bf16", "c8.s32", "c4.km32"}};
    StoredWeights weights = stored_as(stored_name(stored));
    std::vector<std::string> contents;
    for (const Piece& piece : all) {
      SourcePiece own{piece.name, piece.dtype, piece.shape, "", 0};
      contents.push_back(std::string(piece.name) == "g_idx"
                             ? groups()
                             : noise(own.bytes(), piece.odd, piece.even, 9));
      own.file = write(made.what + piece.name, contents.back());
      made.source.aux.push_back(own);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      weights.pieces[all[i].name] = {all[i].dtype, all[i].shape,
                                     std::as_bytes(std::span(contents[i]))};
    }
    const Format exact = exact_format(weights);
    if (is_packed(exact)) made.formats.insert(made.formats.begin(), format_name(exact));
    return made;
  }

 private:
  // Columns of six groups in turn.
  static std::string groups() {
    std::string text;
    for (int32_t col = 0; col < kCols; ++col) {
      const int32_t group = col % 6;
      text.append(reinterpret_cast<const char*>(&group), sizeof group);
    }
    return text;
  }
  std::string write(const std::string& file, const std::string& content) const {
    std::ofstream(folder_ + "/" + file, std::ios::binary) << content;
    return file;
  }

  std::string folder_;
};

inline std::vector<Source> all_sources(const std::string& folder) {
  Sources in(folder);
  std::vector<Source> all;
  for (const auto stored : {Stored::kF32, Stored::kF16, Stored::kBF16})
    all.push_back(in.dense(stored));
  for (int i = static_cast<int>(Stored::kQ4_0); i <= static_cast<int>(Stored::kMXFP4); ++i) {
    all.push_back(in.blocks(static_cast<Stored>(i)));
  }
  for (const auto stored : {Stored::kC8S32, Stored::kC4KM32}) all.push_back(in.strips(stored));
  const auto gptq = [&](int64_t per_word) {
    return std::vector<Sources::Piece>{{"qweight", "i32", {kCols / per_word, kRows}, 0xff, 0xff},
                                       {"qzeros", "i32", {6, kRows / per_word}, 0x77, 0x77},
                                       {"scales", "f16", {6, kRows}, 0xa3, 0xff}};
  };
  all.push_back(in.pieces(Stored::kGptq4, gptq(8)));
  all.push_back(in.pieces(Stored::kGptq8V2, gptq(4)));
  all.push_back(in.pieces(Stored::kAwq4, {{"qweight", "i32", {kCols, kRows / 8}, 0xff, 0xff},
                                          {"qzeros", "i32", {6, kRows / 8}, 0xff, 0xff},
                                          {"scales", "f16", {6, kRows}, 0xa3, 0xff}}));
  all.push_back(in.pieces(Stored::kCt4, {{"weight_packed", "i32", {kRows, kCols / 8}, 0xff, 0xff},
                                         {"weight_scale", "bf16", {kRows, 24}, 0x3f, 0xff}}));
  all.push_back(in.pieces(Stored::kCt8, {{"weight", "i8", {kRows, kCols}, 0xff, 0xff},
                                         {"weight_scale", "bf16", {kRows, 1}, 0x3f, 0xff}}));
  all.push_back(in.pieces(Stored::kF8E4M3, {{"weight", "f8e4m3", {kRows, kCols}, 0xfb, 0xfb},
                                            {"weight_scale_inv", "f32", {1, 6}, 0x3f, 0x7f}}));
  all.push_back(in.pieces(Stored::kMx4, {{"blocks", "u8", {kRows, kCols / 2}, 0xff, 0xff},
                                         {"scales", "u8", {kRows, kCols / 32}, 0x83, 0x83}}));
  all.push_back(in.pieces(Stored::kColumns, {{"weight", "f16", {kCols, kRows}, 0x3f, 0xff}}));
  auto mixed = gptq(8);
  mixed.push_back({"g_idx", "i32", {kCols}, 0, 0});
  all.push_back(in.pieces(Stored::kGptq4V2, mixed));
  return all;
}

}  // namespace helm::test
