package rotate

import (
	"fmt"

	"github.com/jackc/pgx/v5"

	"converger/internal/secrets"
)

// The queries are made of names from [secrets.Column], which are constants of the program; all else is arguments.

func names(c secrets.Column) (table, column, row string) {
	return pgx.Identifier{c.Table}.Sanitize(), pgx.Identifier{c.Name}.Sanitize(), pgx.Identifier{c.Row}.Sanitize()
}

// statusQuery counts values by their first five bytes: the format's version and the id of the key.
func statusQuery(c secrets.Column) string {
	table, column, _ := names(c)
	return fmt.Sprintf(`SELECT substring(%[2]s FROM 1 FOR 5) AS head, count(*) FROM %[1]s WHERE %[2]s IS NOT NULL GROUP BY head ORDER BY head`,
		table, column)
}

// nextQuery reads the values of the next rows after $1 that do not begin with $2, at most $3.
func nextQuery(c secrets.Column) string {
	table, column, row := names(c)
	return fmt.Sprintf(`SELECT %[3]s, %[2]s FROM %[1]s
WHERE %[3]s > $1 AND %[2]s IS NOT NULL AND ($2::bytea IS NULL OR substring(%[2]s FROM 1 FOR 5) <> $2) ORDER BY %[3]s LIMIT $3`,
		table, column, row)
}

// replaceQuery puts $1 in the place of $3, unless something else stands there by now.
func replaceQuery(c secrets.Column) string {
	table, column, row := names(c)
	return fmt.Sprintf(`UPDATE %[1]s SET %[2]s = $1 WHERE %[3]s = $2 AND %[2]s = $3`, table, column, row)
}
