// How products are cut for a team: every row meets every token once.
#include "cpu/linear_rows.h"

#include <doctest/doctest.h>

#include <vector>

namespace helm::test {
namespace {

// Parts of 2 KiB per row that are cut at multiples of `unit` rows.
cpu::LinearRows rows_of(const std::vector<int64_t>& first_row, int64_t unit) {
  cpu::LinearRows all;
  all.first_row = first_row;
  all.row_unit.assign(first_row.size() - 1, unit);
  all.row_bytes = 2048;
  return all;
}

}  // namespace

TEST_CASE("every slice of a member's rows of each part is one piece of a product of few tokens") {
  for (const std::vector<int64_t>& first_row :
       std::vector<std::vector<int64_t>>{{0, 1},
                                         {0, 100},
                                         {0, 16, 20, 24},
                                         {0, 2048, 3072, 4096},
                                         {0, 3072, 6144},
                                         {0, 151936}}) {
    for (const int members : {1, 2, 3, 16}) {
      CAPTURE(first_row.back());
      CAPTURE(members);
      const cpu::LinearRows all = rows_of(first_row, 1);
      const std::vector<cpu::DecodePiece> pieces = cpu::decode_pieces(all, members);
      REQUIRE(pieces.size() % static_cast<size_t>(members) == 0);
      const size_t each = pieces.size() / static_cast<size_t>(members);
      std::vector<int64_t> covered(first_row.size() - 1);
      for (int member = 0; member < members; ++member) {
        const cpu::DecodePiece* next = pieces.data() + static_cast<size_t>(member) * each;
        const cpu::DecodePiece* const end = next + each;
        for (size_t part = 0; part < covered.size(); ++part) {
          const Team::Part rows = all.decode_part(member, members, part);
          if (rows.begin == rows.end) continue;
          REQUIRE(rows.begin == covered[part]);
          covered[part] = rows.end;
          REQUIRE(next != end);
          for (int64_t slice = 0, slices = next->slices; slice < slices; ++slice, ++next) {
            REQUIRE(next != end);
            REQUIRE(next->part == part);
            REQUIRE(next->first_row == rows.begin);
            REQUIRE(next->rows == rows.end - rows.begin);
            REQUIRE(next->slice == slice);
            REQUIRE(next->slices == slices);
          }
        }
        for (; next != end; ++next) REQUIRE(next->rows == 0);
      }
      for (size_t part = 0; part < covered.size(); ++part) {
        REQUIRE(covered[part] == first_row[part + 1] - first_row[part]);
      }
    }
  }
}

TEST_CASE("parts are cut at multiples of their unit, wherever they begin") {
  for (const std::vector<int64_t>& first_row :
       std::vector<std::vector<int64_t>>{{0, 1}, {0, 100}, {0, 7, 40, 93}, {0, 2048, 2056, 4001}}) {
    for (const int64_t unit : {1, 16}) {
      const cpu::LinearRows all = rows_of(first_row, unit);
      for (size_t part = 0; part + 1 < first_row.size(); ++part) {
        const int64_t rows = first_row[part + 1] - first_row[part];
        const auto aligned = [&](int64_t row) { return row % unit == 0 || row == rows; };
        for (const int members : {1, 2, 3, 16}) {
          int64_t decode_end = 0, prefill_end = 0;
          for (int member = 0; member < members; ++member) {
            const Team::Part own = all.decode_part(member, members, part);
            REQUIRE(own.begin == decode_end);
            REQUIRE(aligned(own.end));
            decode_end = own.end;
          }
          REQUIRE(decode_end == rows);
          const cpu::PrefillPieces pieces(all.rows(), members);
          for (int64_t i = 0; i < pieces.count(); ++i) {
            const auto piece = pieces.at(i);
            const Team::Part some = all.rows_of(part, piece.row, piece.end_row);
            if (some.begin == some.end) continue;
            REQUIRE(some.begin == prefill_end);
            REQUIRE(aligned(some.end));
            prefill_end = some.end;
          }
          REQUIRE(prefill_end == rows);
        }
      }
    }
  }
}

TEST_CASE("a member's rows of a large product of few tokens are many pieces, of a small one few") {
  const auto pieces_of = [](int64_t rows) {
    return cpu::decode_pieces(rows_of({0, rows}, 1), 2).size() / 2;
  };
  CHECK(pieces_of(16) == 1);
  CHECK(pieces_of(128) == 2);
  CHECK(pieces_of(4096) == 8);
  CHECK(pieces_of(151936) > 250);
}

TEST_CASE("pieces of a product of many tokens cover it once") {
  for (const int64_t rows : {1, 31, 32, 200, 256, 1024, 1500, 4096}) {
    for (const int members : {1, 2, 3, 16}) {
      CAPTURE(rows);
      CAPTURE(members);
      const cpu::PrefillPieces pieces(rows, members);
      int64_t covered = 0;  // in order, without a gap; the last pieces may be empty
      for (int64_t i = 0; i < pieces.count(); ++i) {
        const auto piece = pieces.at(i);
        REQUIRE(piece.row == covered);
        REQUIRE(piece.end_row >= piece.row);
        covered = piece.end_row;
      }
      REQUIRE(covered == rows);
    }
  }
}

TEST_CASE("rows too few for panels give every member several pieces") {
  for (const int members : {2, 4, 16}) {
    const cpu::PrefillPieces pieces(members * 128, members);
    CHECK(pieces.count() == members * 4);
  }
}

TEST_CASE("a member's last piece of a product of many tokens is a small one") {
  for (const int members : {1, 2, 3}) {
    const cpu::PrefillPieces pieces(4096, members);
    for (int member = 0; member < members; ++member) {
      const auto part = Team::part_of(member, members, pieces.count());
      const auto first = pieces.at(part.begin), last = pieces.at(part.end - 1);
      CHECK(first.end_row - first.row == 256);
      CHECK(last.end_row - last.row == 64);
    }
  }
}

}  // namespace helm::test
